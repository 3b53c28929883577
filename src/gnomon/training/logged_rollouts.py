"""Rollouts that a run logged, as what another run trains on."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

from gnomon.algorithms import Algorithm
from gnomon.algorithms.composition import effective_size
from gnomon.algorithms.user_pieces import spelled
from gnomon.config.experiment import Experiment, load, with_absolute_paths
from gnomon.core.errors import ConfigError, DatasetError, shortened
from gnomon.core.progress import track
from gnomon.core.tables import flat, to_table
from gnomon.core.types import GIVEN, Group, Rollout, Task
from gnomon.learner.base import Learner
from gnomon.models.load import load_tokenizer
from gnomon.models.tokenizer import Tokenizer
from gnomon.records.batches import LARGEST_LOGPROB
from gnomon.records.directory import RunDirectory
from gnomon.records.rollouts import RecordedRollout, read_rollouts
from gnomon.records.run_card import file_digests, read_card, reward_digests
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grading import WeightedReward
from gnomon.rollouts.collate import collate
from gnomon.rollouts.rollout import RolloutTimer
from gnomon.tasks.base import TaskSet

_MEASURED = 64
"""Groups that the effective sample size is measured on."""
_WORDING = {"prefix", "suffix", "template", "phrase", "prompt_column"}
"""What a task puts around a question."""


@dataclass(frozen=True)
class LoggedRollouts:
    """Groups of logged rollouts: a set of tasks, and what answers each with the group that was logged for it.

    Attributes:
        groups: Each with a task of its own, whose id names the step and the group.
        said: What was left out, in words; "" for nothing.
    """

    name: str
    groups: tuple[Group, ...]
    said: str = ""

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Task:
        return self.groups[index].task

    @property
    def generations(self) -> int:
        """Rollouts of a group."""
        return len(self.groups[0].rollouts)

    @cached_property
    def _by_task(self) -> dict[str, Group]:
        return {group.task.id: group for group in self.groups}

    async def run_group(self, task: Task, round_number: int, watch: RolloutTimer) -> Group:
        """Return the logged group of a task; nothing is generated."""
        # The step's timer expects both; nothing was generated or graded.
        watch.generated(0)
        watch.graded()
        return self._by_task[task.id]


def reads_behavior(algorithm: Algorithm) -> bool:
    """Whether the loss compares with the policy that sampled.

    A correction does unless its ``reads_behavior`` is false: a mask by entropy needs no log-probability of the sampler.
    The unbiased estimate of a KL weighs by it, whatever its anchor.
    """
    corrects = any(getattr(r, "estimator", "") == "unbiased" for r in algorithm.regularizers)
    anchors = (algorithm.ratio.anchor, *(getattr(r, "anchor", "") for r in algorithm.regularizers))
    corrects |= algorithm.correction is not None and getattr(algorithm.correction, "reads_behavior", True)
    return corrects or not {"behavior", "mixture"}.isdisjoint(anchors)


def read_logged(experiment: Experiment, tokenizer: Tokenizer, held_out: TaskSet) -> LoggedRollouts:
    """Return the groups that ``experiment.rollouts_from`` kept, but for those of a held-out prompt.

    Raises:
        UserError: There are none; they are of other tokens or of another temperature; they have no rewards, no
            log-probabilities where the algorithm reads them, or not ``algorithm.num_generations`` in each group; or
            this run words prompts otherwise.
    """
    place = Path(str(experiment.rollouts_from))
    place = place / "rollouts" if (place / "rollouts").is_dir() else place
    files = sorted(place.glob("step-*.jsonl"))
    if not files or not (place.parent / "experiment.toml").is_file():
        raise ConfigError(
            f"rollouts_from = '{experiment.rollouts_from}' has no logged rollouts of a run; name RUN/rollouts, with "
            "step-*.jsonl in it and experiment.toml beside it (records.rollouts = true writes them)"
        )
    source = load(place.parent / "experiment.toml").experiment
    theirs = load_tokenizer(source.model, experiment.trust_remote_code)
    flaw = tokenizer.difference(theirs)
    if flaw is not None:
        raise ConfigError(
            f"rollouts_from = '{place}' has the tokens of '{source.model}', and '{experiment.model}' has others: "
            f"{flaw}; train a model of that family, or name other rollouts"
        )
    # A greedy sampler records log-probabilities of temperature 1.
    sampled, scored = source.sampling.temperature or 1.0, experiment.scoring_temperature
    if sampled != scored:
        raise ConfigError(
            f"rollouts_from = '{place}' has log-probabilities of temperature {sampled:g}, and this run scores at "
            f"{scored:g}; set sampling.temperature = {sampled:g}"
        )
    other = _other_prompts(experiment, source, place)
    if tokenizer.backend.chat_template != theirs.backend.chat_template:
        other = (*other, "the chat template")
    # Compared as token ids, after rendering, so wording cannot hide an overlap.
    forbidden = {held_out[index].prompt for index in range(len(held_out))}
    seen: dict[tuple[int, int], str] = {}
    groups = [g for path in track(files, f"reading {place}", len(files)) for g in _groups(path, seen)]
    kept = [group for group in groups if forbidden.isdisjoint(rollout.prompt for rollout in group.rollouts)]
    _check_groups(experiment.algorithm, kept, place)
    _check_numbers(kept, place, tokenizer)
    # Then the missing log-probabilities are never read, and zeros stand in for NaN.
    if not reads_behavior(experiment.algorithm):
        kept = [replace(group, rollouts=tuple(map(_known, group.rollouts))) for group in kept]
    dropped = len(groups) - len(kept)
    said = [f"{dropped:,} of {len(groups):,} logged groups have a held-out prompt and are left out"] * bool(dropped)
    if other:
        said.append(
            f"{', '.join(other)} of the run that logged {place} differ from this run's, which decide about held-out "
            "questions alone: the prompts that are trained on are those of the log"
        )
    said += _other_rewards(experiment.rewards, source.rewards, place)
    return LoggedRollouts(str(place), tuple(kept), "; ".join(said))


def _other_rewards(rewards: Sequence[WeightedReward], logged: Sequence[WeightedReward], place: Path) -> list[str]:
    """Return in words that this run's rewards are not those that judged the log; nothing where they are."""
    used = file_digests(r.verifier.function.rpartition(":")[0] for r in rewards if isinstance(r.verifier, UserFunction))
    cards = {"sources": used}, read_card(RunDirectory(place.parent).card)
    mine, theirs = (
        reward_digests({"rewards": [to_table(r) for r in each]}, card)
        for each, card in zip((rewards, logged), cards, strict=True)
    )
    if mine == theirs:
        return []
    return [
        f"{place} was judged by {_listed(theirs)}, and its rewards are trained on as they are; this run's, "
        f"{_listed(mine)}, judge held-out answers alone"
    ]


def _listed(digests: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({digest})" for name, digest in digests.items()) or "the task's own"


def _other_prompts(experiment: Experiment, source: Experiment, place: Path) -> tuple[str, ...]:
    """Return the settings of the questions that differ from the source run's.

    Raises:
        ConfigError: This run words questions otherwise; prompts of a log are not written anew.
    """
    named = ("task", "system", "chat_template_kwargs", "template_date")
    # One file may be named from two folders.
    both = map(with_absolute_paths, (experiment, source))
    mine, theirs = (flat({name: to_table(each)[name] for name in named}) for each in both)
    other = [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]
    asked = [key for key in other if key.startswith("task.")]
    is_other = any(key.endswith(("kind", ".set", ".generator", ".benchmark")) for key in asked)
    worded = [k for k in other if k not in asked or (not is_other and k.rpartition(".")[2] in _WORDING)]
    if worded:
        was = ", ".join(f"{key} = {spelled(theirs[key])}" if key in theirs else f"no {key}" for key in worded)
        raise ConfigError(
            f"rollouts_from = '{place}' has prompts of a run with other settings than this one's, and they are not "
            f"written anew: set {shortened(was, 300)}, as there, or log rollouts with your settings (train without "
            "--from)"
        )
    return (*asked, *["environment"] * (source.environment is not None))


async def describe_worth(learner: Learner, logged: LoggedRollouts, experiment: Experiment) -> str:
    """Return how much logged rollouts are worth under the learner's policy, in a sentence."""
    # Rounded up, so that at most that many groups are measured, spread over the whole log.
    step = -(-len(logged) // _MEASURED)
    batch = experiment.algorithm.trained(collate(logged.groups[::step], experiment.scoring_temperature))
    # Given answers were sampled by no known policy.
    mask = batch.mask & ~batch.is_given[:, None]
    weighs = reads_behavior(experiment.algorithm)
    unweighed = "" if weighs else f"; {experiment.algorithm.name} does not weigh them (p3o and algorithm.correction do)"
    if not bool(mask.any()):
        return f"logged rollouts have no log-probabilities, so no effective sample size is known{unweighed}"
    current = (await learner.logprobs(batch)).double()
    size = effective_size(current - batch.behavior.double(), mask)
    return (
        f"logged rollouts: {len(logged):,} groups of {logged.generations}; effective sample size under the policy "
        f"{size.value:.3f} of the tokens (1 where it is the one that sampled; {len(batch):,} answers measured)"
        f"{unweighed}"
    )


def _groups(path: Path, seen: dict[tuple[int, int], str]) -> Iterator[Group]:
    """Yield the groups of a step that its filter kept; ``seen`` has where each group began, of all files.

    Raises:
        DatasetError: A group has answers to several prompts, or comes twice.
    """
    for (step, number), recorded in groupby(read_rollouts(path), lambda r: (r.step, r.group)):
        members = [each for each in recorded if each.is_kept]
        if not members:
            continue
        began = f"{path}, line {members[0].line}"
        other = next((each for each in members if _asked(each) != _asked(members[0])), None)
        # Its rollouts would be compared with each other all the same, and a prompt's difficulty taken for merit.
        if other is not None:
            raise DatasetError(
                f"{path}, line {other.line}: answers another prompt ('{shortened(other.rollout.task_id, 60)}') than "
                f"line {members[0].line} ('{shortened(members[0].rollout.task_id, 60)}'), and both are of group "
                f"{number} of step {step}; give each prompt a number of its own in the field group"
            )
        if seen.setdefault((step, number), began) != began:
            raise DatasetError(
                f"{began}: group {number} of step {step} began before, in {seen[step, number]}; write its lines one "
                "after the other, or give this one another number in the field group"
            )
        name = f"{members[0].rollout.task_id}@{step}.{number}"
        rollouts = tuple(_as_own(m.rollout, name) for m in members)
        # Prompts can differ within a group; the longest row stands for it where its length is checked.
        rows = [row for rollout in rollouts for row in rollout.rows]
        longest = max(rows, key=lambda r: len(r.prompt) + len(r.response))
        task = Task(name, longest.prompt, members[0].question, response=longest.response, mask=longest.mask)
        yield Group(task, rollouts)


def _asked(recorded: RecordedRollout) -> tuple[str, tuple[int, ...]]:
    """Return what a rollout answers; environments and agents may begin one task with several prompts."""
    rollout = recorded.rollout
    return rollout.task_id, rollout.prompt if rollout.ending is None else ()


def _as_own(rollout: Rollout, name: str) -> Rollout:
    """Return a logged rollout as one of this run's task ``name``; what was given to the other run is given here too."""
    # The version of the other run's weights means nothing in this one.
    version = GIVEN if rollout.oldest_version == GIVEN else 0
    segments = tuple(_as_own(segment, name) for segment in rollout.segments)
    return replace(rollout, task_id=name, oldest_version=version, newest_version=version, segments=segments)


def _check_groups(algorithm: Algorithm, groups: Sequence[Group], place: Path) -> None:
    if not groups:
        raise DatasetError(f"rollouts_from = '{place}' has no group to train on")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    unjudged = sum(not r.grade.is_judged and r.grade.error is None for r in rollouts)
    if unjudged:
        raise DatasetError(
            f"{unjudged:,} of {len(rollouts):,} rollouts of {place} have no reward, as those of gnomon sft; name a run "
            "of reinforcement learning"
        )
    lacking = sum(_is_lacking(rollout) for rollout in rollouts)
    if lacking and reads_behavior(algorithm):
        raise DatasetError(
            f"{lacking:,} of {len(rollouts):,} rollouts of {place} have no log-probabilities, and the ratio of "
            f"'{algorithm.name}' is to the policy that sampled them; name other rollouts, or set "
            'algorithm.ratio.anchor = "proximal" without a correction, which takes them as the policy\'s own'
        )
    sizes, asked = sorted({len(group.rollouts) for group in groups}), algorithm.num_generations
    if sizes != [asked]:
        fix = f"set algorithm.num_generations = {sizes[-1]}" if len(sizes) == 1 else "name a log whose groups are whole"
        raise ConfigError(
            f"the groups of {place} have {' or '.join(map(str, sizes))} rollouts, and algorithm.num_generations is "
            f"{asked}; {fix}"
        )


def _check_numbers(groups: Sequence[Group], place: Path, tokenizer: Tokenizer) -> None:
    rows = [row for group in groups for rollout in group.rollouts for row in rollout.rows]
    largest = max(token for row in rows for token in (*row.prompt, *row.response, 0))
    if largest >= tokenizer.vocab_size:
        raise DatasetError(
            f"{place} has the token {largest}, and the model has {tokenizer.vocab_size}; name the rollouts of a run "
            "whose model has the same tokens"
        )
    likeliest = max(p for row in rows for p in (*(p for p in row.logprobs if not math.isnan(p)), 0.0))
    if likeliest > LARGEST_LOGPROB:
        raise DatasetError(
            f"{place} has a log-probability of {likeliest:g}, which is above 0; log natural logarithms of probabilities"
        )


def _is_lacking(rollout: Rollout) -> bool:
    """Whether nobody sampled it, or nothing says how likely a token was."""
    tokens = (pair for row in rollout.rows for pair in zip(row.logprobs, row.mask, strict=True))
    return rollout.oldest_version == GIVEN or any(math.isnan(p) for p, trained in tokens if trained)


def _known(rollout: Rollout) -> Rollout:
    """Return a rollout without log-probabilities as one that was given."""
    return _as_given(rollout) if _is_lacking(rollout) else rollout


def _as_given(row: Rollout) -> Rollout:
    unknown, segments = (0.0,) * len(row.response), tuple(map(_as_given, row.segments))
    row = replace(row, logprobs=unknown, full_logprobs=unknown, segments=segments)
    return replace(row, oldest_version=GIVEN, newest_version=GIVEN)
