"""Reward models: checked before the run's model is loaded, and loaded where the graders are."""

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import torch

from gnomon.core.errors import ConfigError, ModelError, UserError, shortened, unknown
from gnomon.core.sections import EngineConfig, GrammarConfig
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.grammar import Grammar
from gnomon.learner.precision import dtype_of, resolve_precision
from gnomon.models.critic import Classifier, ClassifierFiles, Encoded, load_classifier, read_classifier
from gnomon.models.device import resolve_device
from gnomon.models.tokenizer import Tokenizer
from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.function import spoken_by
from gnomon.rewards.grader_pool import Scorer
from gnomon.rewards.grading import Grading
from gnomon.rewards.judge import RubricJudge
from gnomon.rewards.judge_client import JudgeCache, JudgeClient
from gnomon.rewards.model import RewardModel
from gnomon.tasks.chat import ChatRenderer, hide
from gnomon.training.build_data import TrainingData

_PROBE = Sample("1 + 1 =", "2")
_LOOK_SECONDS = 0.2
_ONE_LINE = {"x-guidance": {"whitespace_pattern": " ?"}}
"""How llguidance is told that JSON has a blank between its parts at most."""


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
    # Training and held-out sets may share a reward; each is checked once.
    for part, settings in dict.fromkeys(each for grading in gradings for each in grading.models.items()):
        if isinstance(settings, RewardModel):
            _checked(settings, part)
        elif on_cluster:
            raise ConfigError(
                f"the reward '{part}' is a judge, and graders on a cluster keep no record of what a judge said; run "
                "without a cluster (cluster.kind = 'none')"
            )
        elif not settings.is_policy:
            JudgeClient(settings, JudgeCache()).try_once()


def check_judging_policy(gradings: Iterable[Grading], engine: EngineConfig, policy: "PolicyJudge") -> None:
    """Refuse the policy as a judge where it cannot be asked, before it is loaded.

    Raises:
        ConfigError: The engine is another than gnomon's own, llguidance is missing, or the context is too short.
    """
    for part, plan in dict.fromkeys(each for grading in gradings for each in grading.models.items()):
        if not isinstance(plan, RubricJudge) or not plan.is_policy:
            continue
        said = f"reward '{part}': the policy as a judge (url = 'policy')"
        if engine.kind != "local":
            raise ConfigError(
                f"{said} is asked by gnomon's own engine, and engine.kind = '{engine.kind}'; set engine.kind = "
                "'local', or give the url of an endpoint"
            )
        # A judge of groups reads several answers at once; two are the shortest such prompt.
        many = 1 + (plan.over == "group")
        prompt = policy.render(plan.messages(*[_PROBE, Sample("1 + 1 =", "3")][:many]))
        whole, longest = len(prompt) + plan.max_tokens, policy.tokenizer.context_length
        if longest is not None and whole > longest:
            raise ConfigError(
                f"{said} reads {len(prompt)} tokens about a short answer and may write max_tokens = {plan.max_tokens}, "
                f"beyond its context of {longest}; lower max_tokens, or take a judge with a longer context"
            )
        grammar = Grammar.of(policy.asked(plan.temperature, plan.max_tokens, plan.schema(many)))
        if grammar is not None and (cut := grammar.cut(plan.max_tokens + 1)):  # grades are read without a stop token
            raise ConfigError(
                f"{said} may write max_tokens = {plan.max_tokens}, too few for its grades: {cut}; raise it"
            )


@dataclass(frozen=True)
class PolicyJudge:
    """The policy as a judge: the engine's weights of the moment answer, drawn by a key of what was asked.

    Attributes:
        engine: Answers in ``loop``, while a thread waits.
        render: Messages to tokens; their texts have no control tokens.
        sampling: The run's, for its stop tokens.
        seed: The run's.
    """

    engine: Engine | None
    loop: asyncio.AbstractEventLoop | None
    render: ChatRenderer
    tokenizer: Tokenizer
    sampling: Sampling
    seed: int

    @classmethod
    def over(cls, data: TrainingData, seed: int, engine: Engine | None = None) -> "PolicyJudge":
        """Return that of a run; of the running event loop where there is an engine."""
        loop = None if engine is None else asyncio.get_running_loop()
        return cls(engine, loop, ChatRenderer(data.tokenizer), data.tokenizer, data.sampling, seed)

    @property
    def version(self) -> int:
        """Of the weights that answer now."""
        return -1 if self.engine is None else self.engine.version

    def asked(self, temperature: float, most: int, schema: Mapping[str, Any]) -> Sampling:
        """Return how a reply is drawn: from all tokens that the schema allows."""
        grammar, ends = GrammarConfig(schema={**schema, **_ONE_LINE}), self.sampling
        return Sampling(
            temperature, max_completion_length=most, grammar=grammar, stop_ids=ends.stop_ids, tokenizer=ends.tokenizer,
            trust_remote_code=ends.trust_remote_code,
        )  # fmt: skip

    def __call__(
        self, body: Mapping[str, Any], schema: Mapping[str, Any], seed: str, is_over: Callable[[], bool]
    ) -> dict[str, Any]:
        """Return the reply; see `JudgingPolicy`."""
        assert self.engine is not None, "asked once there is an engine"
        assert self.loop is not None, "an engine is one of a loop"
        try:
            prompt = self.render(body["messages"])
        except UserError as error:
            raise VerifierError(f"the policy cannot be asked: {error}") from None
        # The draw depends on the run's seed and on what is judged, and not on the order of requests.
        key = int(hashlib.sha256(f"{self.seed} {seed}".encode()).hexdigest()[:32], 16)
        drawn = self.engine.generate(prompt, [key], self.asked(body["temperature"], body["max_tokens"], schema))
        # The engine runs in the event loop of the run, while scorers run in threads of their own.
        reply = asyncio.run_coroutine_threadsafe(drawn, self.loop)
        while not reply.done():
            # In short waits, so that the thread notices when the run ends.
            wait([reply], timeout=_LOOK_SECONDS)
            if is_over():
                reply.cancel()
                raise VerifierError("the run ended before the judge answered")
        try:
            [done] = reply.result()
        except ConfigError as error:
            raise VerifierError(f"the policy cannot be asked: {error}") from None
        return {
            "choices": [{"message": {"content": self.tokenizer.decode(done.tokens)}}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(done.tokens)},
            "version": done.newest_version,
        }


def load_scorer(settings: RewardModel | RubricJudge, said: JudgeCache | None = None) -> Scorer:
    """Return a reward model with its weights, or a judge's client that knows what was ``said`` before.

    Raises as `check_reward_models` does.
    """
    if isinstance(settings, RubricJudge):
        return JudgeClient(settings, JudgeCache() if said is None else said)
    files, output, device = _checked(settings, settings.kind)
    dtype = dtype_of(resolve_precision(settings.precision, str(device)))
    scorer = ModelScorer(settings, load_classifier(files, dtype, device), output)
    try:
        scorer([_PROBE, replace(_PROBE, completion="12")])
    except (ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {shortened(str(error))}"
        raise ModelError(f"reward model '{settings.model}' scores no answer ({why}); give another") from error
    return scorer


def _checked(settings: RewardModel, part: str) -> tuple[ClassifierFiles, int, torch.device]:
    device, files = resolve_device(settings.device), read_classifier(settings.model)
    said, limit = f"reward '{part}' ({settings.model})", files.tokenizer.context_length
    if settings.max_length is not None and limit is not None and settings.max_length > limit:
        raise ConfigError(f"{said}: max_length = {settings.max_length}, and the model reads at most {limit} tokens")
    # A probe: `template` returns None where the tokenizer has no chat template.
    has_template = files.tokenizer.template([{"role": "user", "content": "1"}]) is not None
    if settings.form == "chat" and not has_template:
        raise ConfigError(
            f"{said}: its tokenizer has no chat template; set form = 'pair' to give it two texts, or 'plain' if gnomon "
            "reward-model trained it"
        )
    if settings.form == "plain" and has_template:
        raise ConfigError(f"{said}: its tokenizer has a chat template, which form = 'plain' leaves out; remove form")
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
    # A label may also be given by its number.
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
    if settings.form == "plain":
        rendered = ChatRenderer(files.tokenizer).conversation(asked, answered)
        return {"input_ids": [*rendered.prompt, *rendered.response]}
    hidden = hide(files.tokenizer, [{**said, "content": said.get("content") or ""} for said in (*asked, *answered)])
    return {"input_ids": hidden.encode(files.tokenizer.template(hidden.messages, begins_answer=False) or "")}
