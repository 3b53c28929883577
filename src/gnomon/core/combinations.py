"""SettingsByKey that cannot be meant together. No torch: a file and a command line are looked at before it is imported.

A setting is known by its key, as "learner.processes". Of an algorithm there are its own scalars ("algorithm.scope") and
what follows from its pieces ("algorithm.critic"); a check that asks for one that is not known is passed over, and made
when the algorithm is there.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from gnomon.core.errors import ConfigError, check_read
from gnomon.core.sections import STARTED, STORE

_STALEST = 1024


class SettingsByKey(dict[str, Any]):
    """Every setting of an experiment by its key; those that are none, and have no default, are not in it."""

    def __missing__(self, key: str) -> Any:
        """Raise for a fact of the algorithm that nobody has worked out; None for a setting that is not there."""
        # Two meanings of absence: a setting without a value is None, and a fact of the algorithm is worked out later.
        if key.startswith("algorithm."):
            raise _UnknownYet(key)
        return None

    @property
    def bound(self) -> int:
        """Steps that no rollout is older than."""
        return int(self["staleness.limit"] if self["max_staleness"] == "measured" else self["max_staleness"])

    @property
    def prompts(self) -> int:
        """Prompts asked a step."""
        return int(self["rollouts_per_step"] // self["algorithm.num_generations"])

    @property
    def is_sharded(self) -> bool:
        """Whether processes of their own hold the model."""
        return bool(self["learner.processes"] > 1 or self["learner.offload"])

    @property
    def shares_weights(self) -> bool:
        """Whether the engine reads the learner's own tensors; see `gnomon.training.resolve.Resolved`."""
        is_plain = self["engine.kind"] == "local" and self["engine.count"] == 1 and self["engine.rounding"] == "none"
        return is_plain and self["cluster.kind"] == "none" and self.bound == 0 and not self.is_sharded


class _UnknownYet(LookupError):
    """A fact of an algorithm that is not known before its pieces are made."""


def check_meaning(s: SettingsByKey) -> None:
    """Refuse settings that no machine could follow together.

    Raises:
        ConfigError: The message names the settings and what to write.
    """
    _check_all(s, (_groups, _minibatches, _staleness, _supervised, _logged, _agent))


def check_drawing(s: SettingsByKey) -> None:
    """Refuse answers from which nothing can be learned.

    Raises:
        ConfigError: As `check_meaning`.
    """
    _check_all(s, (_greedy, _distributions))


def check_engines(s: SettingsByKey) -> None:
    """Refuse engines that cannot be meant, or for which nothing would be gained.

    Raises:
        ConfigError: As `check_meaning`.
    """
    _check_all(s, (_engines, _sleep, _vllm))


def check_learner(s: SettingsByKey) -> None:
    """Refuse what does not fit the learner's processes, the device or the cluster.

    Args:
        s: With "cpu" as ``device`` where the run computes on one.

    Raises:
        ConfigError: As `check_meaning`.
    """
    _check_all(s, (_cut, _cluster, _broadcast))


def check_reference(where: str, given: object) -> None:
    """Refuse settings of ``algorithm.reference`` that its policy does not read.

    Args:
        where: As of `check_read`.
        given: A `ReferencePolicy`, or what is set of it, by name.

    Raises:
        ConfigError: As `check_read`.
    """
    said = given if isinstance(given, Mapping) else vars(given)
    model = said.get("model", "start")
    has_teacher = model not in ("start", "average", "policy") or bool(said.get("tasks"))
    teacher = 'a teacher, model = "FOLDER or name" or tasks'
    check_read(
        where, given,
        decay=(model == "average", 'model = "average"'),
        precision=(has_teacher, teacher),
        trust_remote_code=(has_teacher, teacher),
        success=("{sibling}" in said.get("prompt", ""), "{sibling} in prompt"),
    )  # fmt: skip


def _check_all(s: SettingsByKey, checks: tuple[Callable[[SettingsByKey], None], ...]) -> None:
    for check in checks:
        # Checked again with the algorithm's facts once its pieces are made.
        with suppress(_UnknownYet):
            check(s)


def too_few(generations: int, baseline: str, fewest: int) -> str:
    """Return why a group is too small for its baseline."""
    return (
        f"num_generations is {generations} (group size {generations}), but a group baseline ({baseline}) compares "
        f"responses to the same prompt and needs {fewest} or more (the tracked baseline of 'spo' needs no group)"
    )


def _groups(s: SettingsByKey) -> None:
    rollouts, each = s["rollouts_per_step"], s["algorithm.num_generations"]
    if rollouts % each:
        raise ConfigError(
            f"rollouts_per_step = {rollouts} is not a multiple of the {each} rollouts that {s['algorithm.name']} asks "
            "of each prompt (algorithm.num_generations); "
            f"try {max(1, (2 * rollouts + each) // (2 * each)) * each}"
        )
    if each < s["algorithm.fewest"]:
        said = too_few(each, s["algorithm.baseline"], s["algorithm.fewest"])
        raise ConfigError(
            f"algorithm '{s['algorithm.name']}': {said}; set algorithm.num_generations = {s['algorithm.fewest']}"
        )
    if rollouts == 1 and s["steps"] and s["algorithm.batch_baseline"]:
        raise ConfigError(
            "rollouts_per_step = 1, and the baseline is the mean reward of the step, so the advantage would always be "
            "0; set rollouts_per_step = 2 or more"
        )


def _minibatches(s: SettingsByKey) -> None:
    rollouts = s["rollouts_per_step"]
    for name in ("updates", "critic.updates"):
        count = s[f"algorithm.{name}.minibatches"]
        if count > rollouts:
            raise ConfigError(
                f"algorithm.{name}.minibatches = {count} are more than the {rollouts} rollouts of a step "
                f"(rollouts_per_step), and an update needs one at least; set algorithm.{name}.minibatches = {rollouts} "
                "or less"
            )


def _staleness(s: SettingsByKey) -> None:
    bound, slack, is_measured = s.bound, s["staleness.slack"], s["max_staleness"] == "measured"
    if bound > _STALEST:
        name = "staleness.limit" if is_measured else "max_staleness"
        raise ConfigError(
            f"{name} = {bound} asks the rollouts of {bound + 1} steps at once and keeps them in memory; set {name} = "
            f"{_STALEST} or less"
        )
    if slack and is_measured:
        raise ConfigError('staleness.slack is set by what is measured with max_staleness = "measured"; remove it')
    if slack > bound:
        raise ConfigError(f"staleness.slack must be from 0 to max_staleness = {bound} steps, got {slack}")


def _supervised(s: SettingsByKey) -> None:
    """Refuse what has no meaning for the dataset's answers, or for sampled ones alone."""
    if s["algorithm.demonstrated"] and (s["max_staleness"] == "measured" or s["environment"]):
        raise ConfigError(
            "algorithm.demonstrated puts the dataset's answers beside sampled ones; they were not sampled, so no "
            "effective sample size bounds them, and no environment replies to them: set max_staleness to a number, and "
            "remove environment"
        )
    if not s["algorithm.is_supervised"]:
        if s["max_length"] is not None:
            raise ConfigError(
                f'max_length = {s["max_length"]} is of rows of supervised fine-tuning (algorithm = "sft"); '
                "sampling.max_completion_length bounds answers that are generated"
            )
        if s["evaluation.samples"] == 0:
            raise ConfigError("evaluation.samples must be at least 1 (0 is for supervised fine-tuning), got 0")
        return
    if s["environment"]:
        raise ConfigError(
            "supervised fine-tuning trains on the dataset's answers, and an environment replies to generated ones; "
            "remove environment (conversations of several turns are rows of messages), or choose another algorithm"
        )
    if s.bound:
        raise ConfigError(
            f"supervised fine-tuning generates nothing that could be old, and max_staleness is "
            f"{s['max_staleness']!r}; set max_staleness = 0"
        )


def _logged(s: SettingsByKey) -> None:
    """Refuse what would have to ask the policy where logged rollouts are trained on."""
    if s["rollouts_from"] is None:
        return
    wrong = {
        "environment = none": s["environment"],
        "max_staleness = 0": s.bound > 0,
        'algorithm = "p3o"': s["algorithm.is_supervised"],
        "algorithm.demonstrated = false": s["algorithm.demonstrated"],
        "algorithm.keep = none": s["algorithm.keep"],
        "algorithm.overlong = none": s["algorithm.overlong"],
        "algorithm.replay = none": s["algorithm.replay"],
        "algorithm.sampler = Uniform": s["algorithm.sampler"],
        "algorithm.tracker = none": s["algorithm.tracker"],
        'algorithm.routing = "free"': s["algorithm.routing"] == "behavior",
        "an algorithm that reads no whole distributions": s["algorithm.distributions"],
        "an algorithm that reads no parts of rewards": s["algorithm.parts"],
        "an algorithm without hints": s["algorithm.hints"],
        "an algorithm that asks for no roles (InRole)": s["algorithm.roles"],
    }
    found = [fix for fix, is_wrong in wrong.items() if is_wrong]
    if found:
        raise ConfigError(
            f"rollouts_from = '{s['rollouts_from']}' trains on logged rollouts, and this experiment asks for "
            f"others or for more than their log says; set {' and '.join(found)}"
        )


def _agent(s: SettingsByKey) -> None:
    if s["system"] and (s["environment.kind"] == "agent" or s["environment.is_agent"]):
        raise ConfigError("an agent writes its own system message, so `system` reaches no prompt; remove it")


def _greedy(s: SettingsByKey) -> None:
    """Refuse training on greedy answers where the loss would be none: no draw, so no ratio and no groups.

    With one answer a prompt and ``learner.temperature`` it is a choice that has a meaning: the ratio is 1 at the first
    update, as if the answer had been drawn at temperature 1.
    """
    is_greedy = s["sampling.temperature"] == 0
    if s["steps"] == 0 or not (is_greedy or s["sampling.top_k"] == 1):
        return
    answers = s["algorithm.num_generations"]
    if answers > 1 and not s["environment"]:
        why = f"the {answers} answers to a prompt (algorithm.num_generations) would be one answer {answers} times"
    elif is_greedy and s["learner.temperature"] is None:
        why = "no log-probability of a sampled token is there for the ratio (or give learner.temperature = 1)"
    else:
        return
    key, way = ("temperature = 0", "above 0") if is_greedy else ("top_k = 1", "to 0 (every token) or above 1")
    raise ConfigError(
        f"sampling.{key} takes the likeliest token each time: {why}; set it {way}, and "
        "evaluation.sampling.temperature = 0 to evaluate greedily"
    )


def _distributions(s: SettingsByKey) -> None:
    """Refuse to compare with distributions that the engine does not return, or that leave tokens out."""
    if s["steps"] == 0 or not s["algorithm.distributions"]:
        return
    # Values that restrict nothing.
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0}
    cut = {name: s[f"sampling.{name}"] != usual for name, usual in neutral.items()}
    cut["temperature"] = not s["sampling.temperature"]
    said = [f"sampling.{name} = {s[f'sampling.{name}']:g}" for name, is_cut in cut.items() if is_cut]
    said += ["sampling.grammar"] * any(key.startswith("sampling.grammar.") for key in s)
    if s["engine.kind"] == "vllm":
        why = "gnomon's vLLM engines return the log-probability of the drawn token alone; set engine.kind = 'local'"
    elif said:
        why = f"{', '.join(said)} gives tokens probability 0, where the KL has no bound; draw from all tokens"
    else:
        return
    raise ConfigError(
        f"EssKl's estimator = 'exact' compares with the whole distribution that tokens were drawn from, and {why}, or "
        "estimator = 'unbiased'"
    )


def _engines(s: SettingsByKey) -> None:
    # Prompts of the step that is trained and of each step ahead of it are in flight together.
    count, asked = s["engine.count"], s.prompts * (s.bound + 1)
    if count > asked:
        raise ConfigError(
            f"engine.count = {count} exceeds the {asked} prompt{'s' * (asked != 1)} in flight; the extra engines would "
            f"stay idle; set engine.count = {asked} or less, or raise rollouts_per_step"
        )


def _sleep(s: SettingsByKey) -> None:
    """Refuse an engine that cannot sleep while the learner works, or for whose sleep nothing would be gained."""
    count, processes = s["engine.count"], s["learner.processes"]
    if not s["engine.sleeps"]:
        return
    if s.shares_weights:
        why = (
            "the engine answers with the learner's own weights, so there is nothing to release; leave it out, or set "
            "learner.offload = true, learner.processes or max_staleness = 1"
        )
    elif s["algorithm.pretraining"]:
        why = "value pre-training asks between its updates; leave algorithm.critic.pretraining out"
    elif s["cluster.kind"] != "none" and count > processes:
        why = (
            f"each engine shares the place of one learner, and engine.count = {count} with learner.processes = "
            f"{processes}; set engine.count = {processes} or less"
        )
    else:
        return
    raise ConfigError(f"engine.sleeps = true: {why}")


def _vllm(s: SettingsByKey) -> None:
    if s["engine.kind"] != "vllm":
        return
    if s["engine.count"] > 1 and s["engine.server"] not in ("", STARTED):
        raise ConfigError(
            f"engine.server = '{s['engine.server']}' is one engine, and engine.count = {s['engine.count']}; set "
            f'engine.count = 1, or engine.server = "{STARTED}" for servers of their own'
        )
    if s["algorithm.routing"] == "behavior":
        raise ConfigError(
            'algorithm.routing = "behavior" replays the experts that the engine chose, and gnomon does not ask vLLM '
            'which; set algorithm.routing = "proximal", or engine.kind = "local"'
        )
    if s["trust_remote_code"]:
        raise ConfigError(
            "trust_remote_code lets a model's own code run in this process, and vLLM would not run it; set "
            'engine.kind = "local"'
        )


def _cut(s: SettingsByKey) -> None:
    """Refuse settings of the learner that do not fit its processes, or the device."""
    processes, offload, base = s["learner.processes"], s["learner.offload"], s["lora.base"]
    if s.is_sharded and base not in (None, "unquantized"):
        raise ConfigError(
            f"lora.base = '{base}' lies whole in the learner's one process, and learner.processes = "
            f"{processes}, learner.offload = {str(offload).lower()} would hold a part of it in each; set "
            "learner.processes = 1 and learner.offload = false, or leave lora.base out"
        )
    if offload and s["device"] == "cpu":
        raise ConfigError(
            "learner.offload keeps weights in the machine's memory instead of a GPU's, and this run computes on "
            "the CPU; set learner.offload = false"
        )
    if processes > 1 and s["algorithm.scope"] == "micro_batch":
        raise ConfigError(
            'algorithm.scope = "micro_batch" lets the loss depend on how a step is cut, and '
            f"learner.processes = {processes} cuts it otherwise than one process does; set "
            'algorithm.scope = "step" or "lagged", or learner.processes = 1'
        )


def _cluster(s: SettingsByKey) -> None:
    if s["cluster.kind"] == "none":
        return
    if ":" in s["device"]:
        raise ConfigError(
            f"device = '{s['device']}' is one GPU of this machine, and a cluster deals its GPUs out itself; set "
            "device = 'cuda'"
        )
    if s["engine.server"]:
        raise ConfigError(
            "engine.server is about servers, and on a cluster each engine is a process of its own; "
            'remove it, or set cluster.kind = "none"'
        )


def _broadcast(s: SettingsByKey) -> None:
    """Refuse weights that cannot be sent by vLLM's own transfer."""
    backend = s["cluster.transfer"]
    if s["cluster.kind"] == "none" or backend == STORE:
        return
    if s["engine.kind"] != "vllm":
        why = f"is vLLM's own transfer, and engine.kind = '{s['engine.kind']}'; set engine.kind = 'vllm'"
    elif backend == "nccl" and s["device"] == "cpu":
        why = f"goes from GPU to GPU, and device = '{s['device']}' is none; set device = 'cuda'"
    elif s["engine.rounding"] != "none":
        rounding = s["engine.rounding"]
        why = f"sends the learner's own numbers, and engine.rounding = '{rounding}'; set engine.rounding = 'none'"
    elif s["lora.rank"] is not None:
        why = "sends whole weights, and with lora adapters travel alone"
    else:
        return
    raise ConfigError(f"cluster.transfer = '{backend}' {why}; or set cluster.transfer = '{STORE}'")


def of_table(flat: Mapping[str, Any]) -> SettingsByKey:
    """Return settings by their keys, with whether there is an environment."""
    return SettingsByKey({**flat, "environment": any(key.startswith("environment.") for key in flat)})
