"""The small sections of an experiment: plain values, each checked when it is made."""

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from gnomon.core.errors import ConfigError, bounded, dotted, shortened
from gnomon.core.redaction import check_no_secret

MOST_TOKENS = 64
"""Rollouts of a step that may be looked at token by token."""


_DRAWN = {
    "temperature": "0 (greedy) or more, and finite", "top_p": "in (0, 1]", "top_k": "0 (every token) or more",
    "min_p": "in [0, 1)", "max_completion_length": "at least 1 token",
}  # fmt: skip


_LONGEST_GRAMMAR = 1 << 20


@dataclass(frozen=True)
@bounded("sampling.grammar")
class GrammarConfig:
    r"""What every answer obeys: a JSON schema or a regular expression, or nothing.

    Attributes:
        schema: JSON schema as a table, as JSON text, or the path of a file that has it. A run's record has its text.
        regex: Regular expression of the whole answer, in the syntax of Rust (no look-around and no anchors; \d is any
            digit of Unicode).

    Raises:
        ConfigError: Both are given, one is empty or too long, or a file cannot be read or is no JSON.

    >>> GrammarConfig(schema={"type": "integer"}).schema
    '{"type": "integer"}'
    """

    schema: str | dict[str, Any] | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if self.schema is not None and self.regex is not None:
            raise ConfigError("sampling.grammar has a schema and a regex, and an answer obeys one of them; remove one")
        if self.schema is not None:
            # The dataclass is frozen, and the record must hold the schema
            # itself and no path that another machine does not have.
            object.__setattr__(self, "schema", _schema_text(self.schema))
        if self.regex is not None and not 0 < len(self.regex) <= _LONGEST_GRAMMAR:
            raise ConfigError(
                f"sampling.grammar.regex has {len(self.regex):,} characters; it may have from 1 to {_LONGEST_GRAMMAR:,}"
            )

    @property
    def is_set(self) -> bool:
        """Whether answers obey anything."""
        return self.schema is not None or self.regex is not None

    @property
    def words(self) -> str:
        """What answers are: "JSON of the schema ..." or "text of the expression ...".

        >>> GrammarConfig(regex="[0-9]+").words
        "text of the expression '[0-9]+'"
        """
        if self.schema is not None:
            return f"JSON of the schema {shortened(str(self.schema))}"
        return "free" if self.regex is None else f"text of the expression {shortened(repr(self.regex))}"


def _schema_text(schema: str | dict[str, Any]) -> str:
    """Return a JSON schema as JSON, of a table, a text or a file."""
    if isinstance(schema, dict):
        return json.dumps(schema, ensure_ascii=False)
    text, place = schema, "sampling.grammar.schema"
    if not schema.lstrip().startswith("{"):
        place = f"{place} = {schema!r}"
        try:
            text = Path(schema).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{place} cannot be read ({error}); write the path of a JSON file, or the schema"
            ) from error
    if len(text) > _LONGEST_GRAMMAR:
        raise ConfigError(f"{shortened(place)} has {len(text):,} characters; it may have {_LONGEST_GRAMMAR:,}")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shortened(place)} is no JSON ({error}); correct it") from error
    if not isinstance(table, dict):
        raise ConfigError(
            f'{place} is {shortened(text.strip())}, which is no table; write one, such as {{"type": "object"}}'
        )
    return text


@dataclass(frozen=True)
@bounded("sampling", **_DRAWN)
class SamplingConfig:
    """How answers are drawn.

    Attributes:
        temperature: Divisor of the logits; below 1 sharpens the distribution, and 0 takes the likeliest token each time
            (the lowest id of a tie; recorded log-probabilities are then those of temperature 1).
        top_p: Probability mass that is drawn from, in (0, 1]; 1 is no restriction.
        top_k: Number of most likely tokens that are drawn from; 0 is no restriction.
        min_p: Least probability of a drawn token, as a share of the most likely token's; 0 is no restriction.
        max_completion_length: Most tokens of an answer; in a conversation, of everything after the prompt.
        stop_ids: Token ids that end an answer, beside the model's own.
        stop: Texts that end an answer, one or a list, wherever they begin and end within tokens. The tokens up to the
            one that completes a text are trained.
        include_stop: Whether rewards and environments see the text that ended an answer; they see what is before it
            otherwise.
        grammar: What every answer of the policy obeys, such as {schema = "answer.json"} or {regex = "[0-9]+"}. Needs
            llguidance (pip install 'gnomon[grammar]').

    Raises:
        ConfigError: A number is out of range; a stop text is empty, too long, or there are too many.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_completion_length: int = 64
    stop_ids: tuple[int, ...] = ()
    stop: str | tuple[str, ...] = ()
    include_stop: bool = False
    grammar: GrammarConfig = GrammarConfig()

    def __post_init__(self) -> None:
        _check_stop("sampling.stop", self.stop)
        if not isinstance(self.stop, str):  # a list of a file or a caller, where settings are compared and hashed
            object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.grammar, Mapping):  # of a record, or of a caller of another process
            object.__setattr__(self, "grammar", GrammarConfig(**self.grammar))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts of ``stop``, as a list."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop


_MOST_STOPS, _LONGEST_STOP = 64, 256


def _check_stop(key: str, stop: str | tuple[str, ...]) -> None:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > _MOST_STOPS:
        raise ConfigError(
            f"{key} has {len(strings)} texts, and each is looked for at each token: {_MOST_STOPS} at most"
        )
    for string in strings:
        if not isinstance(string, str):
            raise ConfigError(f"{key} has {string!r}, which is no text; token ids are {key}_ids")
        if not string or len(string) > _LONGEST_STOP:
            raise ConfigError(
                f"{key} has a text of {len(string)} characters, {shortened(repr(string))}; it may have from 1 to "
                f"{_LONGEST_STOP}"
            )
        if "\N{REPLACEMENT CHARACTER}" in string:
            raise ConfigError(f"{key} has {string!r}: that character stands for bytes that are no text; leave it out")


@dataclass(frozen=True)
@bounded("evaluation.sampling", **_DRAWN)
class EvalSampling:
    """How held-out answers are drawn. What is not set is as in training, which a run says at its start.

    Attributes:
        temperature: Divisor of the logits, 0 for the likeliest token each time; none takes that of ``sampling``.
        top_p: Probability mass that is drawn from, in (0, 1]; none takes that of ``sampling``.
        top_k: Number of most likely tokens that are drawn from, 0 for all; none takes that of ``sampling``.
        min_p: Least probability of a drawn token, as a share of the most likely token's; none takes that of
            ``sampling``.
        max_completion_length: Most tokens of an answer; none takes that of ``sampling``.
        stop: Texts that end an answer, [] for none at all; none takes those of ``sampling``.
        include_stop: Whether rewards see the text that ended an answer; none does as ``sampling``.
        grammar: What answers obey, {} for nothing; none takes that of ``sampling``.

    Raises:
        ConfigError: A number is out of range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_completion_length: int | None = None
    stop: str | tuple[str, ...] | None = None
    include_stop: bool | None = None
    grammar: GrammarConfig | None = None

    def __post_init__(self) -> None:
        _check_stop("evaluation.sampling.stop", self.stop or ())

    @property
    def given(self) -> dict[str, Any]:
        """What is set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def over(self, other: "EvalSampling") -> "EvalSampling":
        """Return this with what it leaves open as ``other`` has it.

        >>> EvalSampling(temperature=0.6).over(EvalSampling(temperature=1.0, top_p=0.9)).given
        {'temperature': 0.6, 'top_p': 0.9}
        """
        return EvalSampling(**{**vars(other), **self.given})

    def words(self, training: SamplingConfig) -> str:
        """Return how answers are drawn, and what of it is training's because nothing else is set.

        >>> EvalSampling(top_p=0.95).words(SamplingConfig())
        "temperature 1 (training's), top_p 0.95, at most 64 tokens (training's)"
        >>> EvalSampling(max_completion_length=1).words(SamplingConfig())
        "temperature 1 (training's), at most 1 token"
        """
        drawn = {**vars(training), **self.given}
        said = [f"temperature {drawn['temperature']:g}{self._origin('temperature')}"]
        for name, none in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
            if drawn[name] != none:
                said.append(f"{name} {drawn[name]:g}{self._origin(name)}")
        most = f"at most {(length := drawn['max_completion_length']):,} token{'s'[: length != 1]}"
        said.append(most + self._origin("max_completion_length"))
        if ends := SamplingConfig(stop=drawn["stop"]).stop_strings:
            said.append(f"until {' or '.join(map(repr, ends))}{self._origin('stop')}")
        if drawn["grammar"].is_set:
            said.append(f"{drawn['grammar'].words}{self._origin('grammar')}")
        return ", ".join(said)

    def _origin(self, name: str) -> str:
        return "" if getattr(self, name) is not None else " (training's)"


TABLE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Files that a table is read from."""
ENGINE_KINDS = "'local', 'vllm', or an engine of your own as 'path.py:Class'"
"""What `EngineConfig.kind` may be, for messages."""

DATE = "2025-01-01"
"""The day that a template reads from its clock, unless the experiment sets another: one day for all runs."""
STARTED = "start"
"""The `EngineConfig.server` that is started for the run."""


@dataclass(frozen=True)
@bounded(
    "engine",
    max_concurrent="at least 1",
    count="at least 1",
    kept_gib="0 (nothing) or more GiB, and finite",
    timeout_seconds="> 0",
    tensor_parallel="at least 1",
)
class EngineConfig:
    """What generates the answers.

    Attributes:
        kind: "local" is gnomon's own engine in this process; "vllm" is vLLM; "path.py:Class" or "module:Class" is an
            engine of your own, with the protocol of `engines.base.Engine`.
        max_concurrent: Answers that each engine decodes at once. The memory of the KV cache grows with it.
        count: Number of engines. Several engines have a copy of the weights each.
        rounding: Number format that the weights are rounded to before an engine gets them; "none" sends them unchanged.
        kept_gib: For "local": GiB of keys and values that each engine keeps between the turns of conversations, so
            that a turn computes its new tokens alone; what was used longest ago is dropped. 0 computes every turn
            from its beginning. Taken only with an ``[environment]``, from the memory of ``device``.
        timeout_seconds: Seconds without any progress after which an engine counts as dead. A server that gnomon starts
            has ten minutes to load its model.
        server: For "vllm": "" runs in this process, "start" starts a server, another text is the address of a running
            one.
        python: Path of the Python interpreter that has vLLM, for ``server = "start"`` and for the engines of a cluster;
            "" is the present interpreter.
        tensor_parallel: For "vllm": number of GPUs (processes on a CPU) of one machine that hold the model of one
            engine together, a part of each layer each. It must divide the number of attention heads.
        draws: For "vllm": "keyed" draws by gnomon's rule, with tokens equal to those of every engine; "vllm" is vLLM's
            own sampler, on its newest model runner and with asynchronous scheduling where the installed vLLM has them.
        settings: Keyword arguments of an engine of your own.
        sleeps: For "local": the engine releases its weights, keys and values while the learner works, and wakes with
            new weights, so that both fit on one set of devices. For an engine with weights of its own
            (``learner.processes``, ``learner.offload``, ``max_staleness`` above 0); on a cluster each shares a
            learner's place. Ahead of the learner (``max_staleness``) answers are judged while it works.

    Raises:
        ConfigError: A number is out of range, or a setting belongs to the other kind of engine.
    """

    kind: str = "local"
    max_concurrent: int = 64
    count: int = 1
    rounding: Literal["none", "fp8", "int8", "int4"] = "none"
    kept_gib: float = 2.0
    timeout_seconds: float = 40.0
    server: str = ""
    python: str = ""
    tensor_parallel: int = 1
    draws: Literal["keyed", "vllm"] = "keyed"
    settings: dict[str, Any] = field(default_factory=dict)
    sleeps: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("local", "vllm") and not self.is_own:
            raise ConfigError(f"engine.kind = {self.kind!r}: should be {ENGINE_KINDS}")
        if self.settings and not self.is_own:
            raise ConfigError("engine.settings are for an engine of your own; set engine.kind = 'path.py:Class'")
        check_no_secret(self.settings)
        if self.kind != "vllm" and (self.server or self.python):
            raise ConfigError('engine.server and engine.python are for engine.kind = "vllm"')
        if self.kind != "vllm" and self.draws != "keyed":
            raise ConfigError('engine.draws = "vllm" is vLLM\'s sampler; set engine.kind = "vllm", or leave it out')
        if self.sleeps and self.kind != "local":
            raise ConfigError(
                f"engine.sleeps is for gnomon's own engine, and engine.kind = '{self.kind}' keeps its memory between "
                'steps; set engine.kind = "local", or engine.sleeps = false'
            )
        if self.tensor_parallel > 1 and self.kind != "vllm":
            who = f"'{self.kind}'" if self.is_own else "gnomon's own engine"
            raise ConfigError(
                f"engine.tensor_parallel = {self.tensor_parallel}, and {who} holds its model on one "
                'device; set engine.kind = "vllm", or engine.tensor_parallel = 1'
            )
        if self.tensor_parallel > 1 and self.server not in ("", "start"):
            raise ConfigError(
                f"engine.tensor_parallel = {self.tensor_parallel} says how an engine is built, and the one at "
                f"engine.server = '{self.server}' is there already; start it with --tensor-parallel, and set "
                "engine.tensor_parallel = 1"
            )

    @property
    def is_own(self) -> bool:
        """Whether the engine is a class of the user's."""
        place, _, name = self.kind.rpartition(":")
        return bool(place.strip()) and name.isidentifier()


@dataclass(frozen=True)
@bounded("staleness", slack="0 or more steps", ess_floor="above 0 and below 1", limit="at least 1 step")
class StalenessConfig:
    """How generation and training overlap, where `Experiment.max_staleness` allows that.

    Attributes:
        stragglers: "wait" waits for an answer that is due. "drop" withdraws it: no step waits then, but short answers
            are favored, and the tokens of the withdrawn answers are lost.
        slack: Number of steps by which fewer prompts are in flight. Answers are usually that many steps fresher than
            the bound, and slow answers may be overtaken and still arrive in time.
        ess_floor: For ``max_staleness = "measured"``: least effective sample size of a step as a share of its rollouts,
            above 0 and below 1. Groups are removed until the rest reaches it.
        limit: For ``max_staleness = "measured"``: steps that no answer is older than, at least 1.

    Raises:
        ConfigError: A number is out of range.
    """

    stragglers: Literal["wait", "drop"] = "wait"
    slack: int = 0
    ess_floor: float = 0.5
    limit: int = 8


@dataclass(frozen=True)
@bounded(
    "budget",
    tokens="0 (no limit) or more",
    seconds="0 (no limit) or more, and finite",
    evaluations="0 or more",
)
class BudgetConfig:
    """What a run may spend. It ends with the step that reaches the budget, or after `Experiment.steps`.

    A learning rate that falls follows `Experiment.steps` all the same; a budget that ends the run earlier leaves the
    rate where it is then.

    Attributes:
        tokens: Tokens generated for training, whether they are trained on or not; 0 is no limit.
        seconds: Seconds of training, without evaluation, checkpoints and loading; 0 is no limit. How many steps these
            are depends on the machine.
        evaluations: Number of evaluations spread evenly over the budget, beside those of ``evaluation.every``.

    Raises:
        ConfigError: A number is out of range, or ``evaluations`` are set without a budget.
    """

    tokens: int = 0
    seconds: float = 0.0
    evaluations: int = 0

    def __post_init__(self) -> None:
        if self.evaluations and not self.is_set:
            raise ConfigError("budget.evaluations are shares of a budget; set budget.tokens or budget.seconds")

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self.tokens > 0 or self.seconds > 0


@dataclass(frozen=True)
@bounded(
    "checkpoints",
    every="0 (at the end alone) or more steps",
    keep_last="at least 1",
    keep_every="0 (none) or more steps",
)
class CheckpointConfig:
    """When a checkpoint is written, and how many are kept.

    Attributes:
        every: Steps between two checkpoints; 0 writes one at the end only.
        keep_last: Number of newest checkpoints that are kept, at least 1.
        keep_every: Steps; checkpoints at its multiples are kept for good; 0 keeps none of them.
        asynchronous: Whether training goes on while a checkpoint is written. A copy of the state is held in memory
            until it is on the disk; where there is not enough free memory, training waits.

    Raises:
        ConfigError: A number is out of range.
    """

    every: int = 25
    keep_last: int = 2
    keep_every: int = 0
    asynchronous: bool = True


@dataclass(frozen=True)
@bounded(
    "grading",
    workers="at least 1",
    deadline_seconds="above 0",
    memory_gib="0 (no limit) or more",
    max_error_fraction="in [0, 1)",
)
class GradingConfig:
    """Processes and limits of the rewards.

    Attributes:
        workers: Number of grading processes, at least 1.
        deadline_seconds: Seconds after which the process of a sample is killed and the sample counts as an error.
        memory_gib: GiB of address space that a process may take beyond its imports; 0 is no limit.
        environment: Names of further environment variables that rewards may read.
        max_error_fraction: Share of the last 50 samples, in [0, 1), that may be errors; more end the run.
        opening: Whether rewards see the text with which a chat template opens the answer, such as ``<think>``.

    Raises:
        ConfigError: A number is out of range.
    """

    workers: int = 2
    deadline_seconds: float = 5.0
    memory_gib: float = 4.0
    environment: tuple[str, ...] = ()
    max_error_fraction: float = 0.2
    opening: bool = True


_LAST_PORT = (1 << 16) - 1
_ADDRESS = re.compile(r"auto|(ray://)?(\[[0-9a-fA-F:.]+\]|[\w.-]+):[0-9]{1,5}")


def _is_address(text: str) -> bool:
    return bool(_ADDRESS.fullmatch(text)) and (text == "auto" or 0 < int(text.rpartition(":")[2]) <= _LAST_PORT)


STORE = "store"
"""The way of weights that every cluster has: its object store."""


@dataclass(frozen=True)
@bounded("cluster", graders="at least 1", start_seconds="above 0 and finite")
class ClusterConfig:
    """Whether learners, engines and graders run on a Ray cluster, and on which.

    Attributes:
        kind: "none" computes on this machine, without Ray; "ray" computes on a cluster.
        address: "" starts a cluster on this machine for this run; "HOST:PORT" or "auto" joins a cluster from one of its
            machines; "ray://HOST:PORT" joins it from any other machine.
        graders: Number of actors that grade, each with ``grading.workers`` processes.
        placement: "pack" uses as few machines as possible; "spread" uses as many as possible.
        start_seconds: Seconds to wait for the cluster, and again for free resources on it.
        transfer: How weights reach the engines. "store" is the cluster's object store. "nccl" is vLLM's own transfer,
            one broadcast from the learner's GPU to those of the vLLM engines. Another text names a transfer that a
            plugin of vLLM registers.

    Raises:
        ConfigError: An address has another form, or a setting needs ``kind = "ray"``.
    """

    kind: Literal["none", "ray"] = "none"
    address: str = ""
    graders: int = 1
    placement: Literal["pack", "spread"] = "pack"
    start_seconds: float = 120.0
    transfer: str = STORE

    def __post_init__(self) -> None:
        if self.address and not _is_address(self.address):
            near = difflib.get_close_matches(self.address, ("ray", "auto", "none"), n=1, cutoff=0.5)
            hint = f": did you mean '{near[0]}'? It" if near else ""
            raise ConfigError(
                f"cluster.address = '{self.address}'{hint} should be HOST:PORT (from one of its machines), "
                'ray://HOST:PORT (from any other) or "auto"; to start a cluster here write cluster = "ray" and no '
                "address"
            )
        if self.kind == "none" and self.address:
            raise ConfigError(f"cluster.address = '{self.address}' needs cluster.kind = 'ray'; set it, or remove both")
        if self.kind == "none" and self.is_broadcasting:
            raise ConfigError(
                f"cluster.transfer = '{self.transfer}' is a way of weights on a cluster; set cluster.kind = 'ray', or "
                "remove it"
            )

    @property
    def is_broadcasting(self) -> bool:
        """Whether the learner sends weights to all engines at once, rather than that each fetches them."""
        return self.transfer != STORE

    @classmethod
    def named(cls, text: str) -> dict[str, str]:
        """Return the table that one word stands for: "ray", "none", or an address.

        >>> ClusterConfig.named("ray://head:10001")
        {'kind': 'ray', 'address': 'ray://head:10001'}
        """
        return {"kind": text} if text in ("ray", "none") else {"kind": "ray", "address": text}


@dataclass(frozen=True)
@bounded("records", tokens=f"in [0, {MOST_TOKENS}]")
class RecordConfig:
    """What is written down beside metrics.

    Attributes:
        rollouts: Whether every graded rollout of every step is recorded.
        batches: Whether every training batch is recorded, for `gnomon dissect`.
        sinks: Where metrics also go: "tensorboard", "wandb", "trackio", "mlflow", "swanlab".
        aliases: Whether metrics are also written under the names that dashboards for TRL and verl expect.
        tokens: Number of rollouts (at most an eighth of a step) of which log-probability and entropy of each token
            under the learner are recorded, in one step of eight; 0 records none.

    Raises:
        ConfigError: ``tokens`` is out of range.
    """

    rollouts: bool = True
    batches: bool = False
    sinks: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"], ...] = ()
    aliases: bool = False
    tokens: int = 8


@dataclass(frozen=True)
class DoctorConfig:
    """Which diagnosis rules look at a run while it trains; `gnomon doctor RUN` diagnoses a run at any time.

    Attributes:
        on: Whether the run is diagnosed while it trains.
        rules: Names of the rules that look; none stands for all. A name with a minus before it leaves that rule out.
        stop_on: A severity ("note", "warning", "severe"), or a list of severities and rules. A finding of that severity
            or above, or of such a rule, ends the run after a checkpoint. A resumed run does not end for the same
            finding again.
    """

    on: bool = True
    rules: tuple[str, ...] = ()
    stop_on: str | tuple[str, ...] = ()

    @property
    def stops(self) -> tuple[str, ...]:
        """What ends the run, as a list."""
        return (self.stop_on,) if isinstance(self.stop_on, str) and self.stop_on else tuple(self.stop_on)


_MOST = {
    "rollouts_per_step": 10**6, "size": 10**7, "samples": 10**5, "count": 10**3, "graders": 10**3, "workers": 10**3,
    "terms": 10**4, "max_concurrent": 10**5, "epochs": 10**4, "minibatches": 10**6, "max_completion_length": 10**8,
    "processes": 10**5, "steps": 10**12, "tokens": 10**15, "concurrency": 10**4,
}  # fmt: skip
_MOST_REAL = 10**9
_NO_COUNTS = ("lowest", "highest", "stop_ids", "parameters", "settings", "max_staleness", "chat_template_kwargs")
_LAST_SEED = 2**63 - 1
"""Generators of Python, NumPy and torch all begin with any seed from 0 to this."""


def check_values(table: Mapping[str, Any], path: str = "", is_counted: bool = True) -> None:
    """Refuse numbers that no machine has room or time for, before any memory is taken for them.

    A slip of the finger (steps = 10**18) would otherwise be found out by a machine that swaps.

    Raises:
        ConfigError: The message names the key, its value and what it may be.

    >>> check_values({"task": {"seed": 2**63}})
    Traceback (most recent call last):
    ...
    gnomon.core.errors.ConfigError: task.seed must be from 0 to 9223372036854775807 (63 bits), got 9223372036854775808
    """
    for key, value in table.items():
        place = dotted(path, str(key))
        # Below such a key numbers are values of a user's own, not counts.
        is_counted_here = is_counted and key not in _NO_COUNTS
        if isinstance(value, Mapping):
            check_values(value, place, is_counted_here)
        elif isinstance(value, list):
            check_values({str(number): inner for number, inner in enumerate(value)}, place, is_counted_here)
        elif isinstance(value, float):
            _check_real(value, place, is_counted_here)
        elif isinstance(value, int):
            _check_count(key, value, place, is_counted_here)
        elif value is None:
            raise ConfigError(f"{place} is null, which the record of an experiment cannot hold; leave it out")


_ESCAPED = re.compile(r"\\[{}]")
_BRACES = re.compile(r"\{[^{}]*\}")
_SPACED = re.compile(r"(?<![A-Za-z}^_\\])\{(?: +(\w+) *| *(\w+) +)\}")


def check_braces(key: str, template: str) -> None:
    r"""Refuse a text with columns in braces of which one brace is alone, or a column has blanks around it.

    >>> check_braces("task.template", r"{question} Write \boxed{x} or \{1, 2\}.")
    """
    # Pairs are taken out from the inside; a brace that is left over has no partner.
    left = _ESCAPED.sub("", template)
    spaced = _SPACED.search(left)
    if spaced is not None:
        raise ConfigError(f"{key}: {spaced[0]!r} names no column with its blanks; write {{{spaced[1] or spaced[2]}}}")
    while _BRACES.search(left):
        left = _BRACES.sub("", left)
    alone = re.search("[{}]", left)
    if alone is not None:
        raise ConfigError(
            f"{key} = {template[:60]!r} has a {alone[0]!r} without its other brace; a column is written as {{answer}}, "
            f"and a brace that means itself as \\{alone[0]}"
        )


def check_date(text: str) -> None:
    """Refuse a template's date that is none.

    Raises:
        ConfigError: If it is none.
    """
    try:
        date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"template_date must be a day as YYYY-MM-DD, such as '{DATE}', got {shortened(repr(text))} ({error})"
        ) from error


def check_texts(value: Any, place: str = "") -> None:
    """Refuse texts with half a surrogate pair, in a table, its keys or a text alone.

    Raises:
        ConfigError: If there is one; it names the place.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_text(str(key), place or "a key")
            check_texts(inner, dotted(place, str(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            check_texts(inner, f"{place}[{number}]")
    elif isinstance(value, str):
        _check_text(value, place)


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place} has half a surrogate pair at character {error.start + 1}, which no UTF-8 file can hold: "
            f"{shortened(ascii(text))}; write it again"
        ) from None


def _check_real(value: float, place: str, is_counted: bool) -> None:
    # Infinity leaves a bound out. Which of an algorithm's numbers are bounds is checked with its pieces.
    is_bound = place.startswith("algorithm.") or place == "learner.optimizer.max_gradient_norm"
    if not math.isfinite(value) and (value != math.inf or not is_bound):
        raise ConfigError(f"{place} = {value} is no finite number; write one, or remove the key")
    if is_counted and not is_bound and abs(value) > _MOST_REAL:  # seconds and bytes that no clock and no integer has
        raise ConfigError(f"{place} = {value} is beyond {_MOST_REAL}, the most that can be meant here")


def _check_count(key: str, value: int, place: str, is_counted: bool) -> None:
    if key == "seed" and not 0 <= value <= _LAST_SEED:
        raise ConfigError(f"{place} must be from 0 to {_LAST_SEED} (63 bits), got {_number(value)}")
    if not is_counted or key == "seed":
        if abs(value) > _LAST_SEED:
            raise ConfigError(f"{place} = {_number(value)} is beyond 63 bits, the most that a whole number may have")
        return
    most = _MOST.get(key, 10**9)
    if value > most:
        raise ConfigError(f"{place} = {_number(value)} is more than {most}, the most that can be meant here")
    if value < -most:
        raise ConfigError(f"{place} = {_number(value)} is less than {-most}, the least that can be meant here")


def _number(value: int) -> str:
    digits = str(value)
    return digits if len(digits) <= 40 else f"{digits[:12]}... ({len(digits)} digits)"
