"""Reward models: checked before the run's model is loaded, and loaded where the graders are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gnomon.core.errors import ConfigError, UserError, unknown
from gnomon.learner.precision import dtype_of, resolve_precision
from gnomon.models.classifier import Classifier, ClassifierFiles, Encoded, load_classifier, read_classifier
from gnomon.models.device import resolve_device
from gnomon.rewards.base import Sample
from gnomon.rewards.function import spoken_by
from gnomon.rewards.grader_pool import Scorer
from gnomon.rewards.grading import Grading
from gnomon.rewards.judge import RubricJudge
from gnomon.rewards.judge_client import JudgeCache, JudgeClient
from gnomon.rewards.model import RewardModel
from gnomon.tasks.chat import hide

_PROBE = Sample("1 + 1 =", "2")


@dataclass(frozen=True)
class ModelScorer(Scorer):
    """A loaded reward model: answers to one question to their scores, or to the cause why one has none."""

    settings: RewardModel
    classifier: Classifier
    output: int

    def __call__(self, samples: Sequence[Sample]) -> list[Mapping[str, float] | str]:
        """Return each answer's score; one that cannot be rendered, is too long, or is no number has its cause."""
        read = [_read(self.settings, self.classifier.files, sample) for sample in samples]
        rows = [row for row in read if not isinstance(row, str)]
        scores = iter(self._scaled(rows) if rows else ())
        return [row if isinstance(row, str) else next(scores) for row in read]

    def _scaled(self, rows: Sequence[Encoded]) -> list[Mapping[str, float] | str]:
        logits, plan = self.classifier.logits(rows, self.settings.batch_size).double(), self.settings
        scaled = logits.softmax(-1) if plan.scaling == "softmax" else logits
        chosen = scaled[:, self.output].sigmoid() if plan.scaling == "sigmoid" else scaled[:, self.output]
        found = ((chosen - plan.mean) / plan.std).tolist()
        return [{"": score} if math.isfinite(score) else f"its score is {score}" for score in found]


def check_reward_models(gradings: Iterable[Grading], on_cluster: bool = False) -> None:
    """Check every reward model by its files, without reading a weight, and ask every judge once.

    Raises:
        ModelError: If a model has no head, or weights are missing.
        ConfigError: If its label, scaling, form, device or length cannot be meant, or a judge is asked on a cluster.
        RewardError: If a judge has no key or cannot be asked.
    """
    for part, settings in dict.fromkeys(each for grading in gradings for each in grading.models.items()):
        if isinstance(settings, RewardModel):
            _checked(settings, part)
        elif on_cluster:
            raise ConfigError(
                f"the reward '{part}' is a judge, and graders on a cluster keep no record of what a judge said; run "
                "without a cluster (cluster.kind = 'none')"
            )
        else:
            JudgeClient(settings, JudgeCache()).try_once()


def load_scorer(settings: RewardModel | RubricJudge, said: JudgeCache | None = None) -> Scorer:
    """Return a reward model with its weights, or a judge's client that knows what was ``said`` before.

    Raises as `check_reward_models` does.
    """
    if isinstance(settings, RubricJudge):
        return JudgeClient(settings, JudgeCache() if said is None else said)
    files, output, device = _checked(settings, settings.kind)
    dtype = dtype_of(resolve_precision(settings.precision, str(device)))
    return ModelScorer(settings, load_classifier(files, dtype, device), output)


def _checked(settings: RewardModel, part: str) -> tuple[ClassifierFiles, int, torch.device]:
    device, files = resolve_device(settings.device), read_classifier(settings.model)
    said, limit = f"reward '{part}' ({settings.model})", files.tokenizer.context_length
    if settings.max_length is not None and limit is not None and settings.max_length > limit:
        raise ConfigError(f"{said}: max_length = {settings.max_length}, and the model reads at most {limit} tokens")
    if settings.form == "chat" and files.tokenizer.template([{"role": "user", "content": "1"}]) is None:
        raise ConfigError(f"{said}: its tokenizer has no chat template; set form = 'pair' to give it two texts")
    try:
        _encoded(settings, files, _PROBE)
    except UserError as error:
        raise ConfigError(f"{said} cannot read a question with its answer: {error}") from error
    return files, _output(settings, files.labels, said), device


def _output(settings: RewardModel, labels: Sequence[str], said: str) -> int:
    """Return the number of the output that is the score. Raises ConfigError."""
    if settings.scaling == "softmax" and len(labels) == 1:
        raise ConfigError(f"{said}: the softmax of one label is 1 for every answer; set scaling = 'sigmoid' or 'none'")
    if settings.label is None:
        if len(labels) == 1:
            return 0
        listed = ", ".join(labels[:10]) + (" ..." if len(labels) > 10 else "")
        raise ConfigError(f"{said} has {len(labels)} labels ({listed}); set label to the one whose score is the reward")
    if settings.label in labels:
        return labels.index(settings.label)
    if settings.label.isdecimal() and int(settings.label) < len(labels):
        return int(settings.label)
    raise ConfigError(f"{said}: {unknown('label', settings.label, labels)}")


def _read(settings: RewardModel, files: ClassifierFiles, sample: Sample) -> Encoded | str:
    """Return the inputs for question and answer, or why there are none."""
    try:
        row = _encoded(settings, files, sample)
    except UserError as error:
        return str(error)
    most, tokens = settings.max_length or files.tokenizer.context_length, row["input_ids"]
    if not tokens:
        return "question and answer have no tokens"
    if most is None or len(tokens) <= most:
        return row
    if settings.truncation == "none":
        return (
            f"question and answer have {len(tokens)} tokens, and the reward model reads {most}; lower "
            "sampling.max_completion_length, or set the reward's truncation to 'left' or 'right'"
        )
    return {"input_ids": tokens[-most:] if settings.truncation == "left" else tokens[:most]}


def _encoded(settings: RewardModel, files: ClassifierFiles, sample: Sample) -> Encoded:
    """Return the inputs for question and answer; text of either is never a control token.

    Raises:
        ConfigError: If the chat template refuses the messages.
    """
    if settings.form == "pair":
        given = files.tokenizer.backend(sample.prompt, sample.completion, split_special_tokens=True)
        return {name: given[name] for name in ("input_ids", "token_type_ids") if name in given}
    asked, answered = spoken_by(sample, True)
    hidden = hide(files.tokenizer, [{**said, "content": said.get("content") or ""} for said in (*asked, *answered)])
    rendered = files.tokenizer.template(hidden.messages, begins_answer=False)
    return {"input_ids": hidden.encode(rendered or "")}
