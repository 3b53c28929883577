"""Reasoning-gym's generators as sets of questions."""

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from gnomon.core.errors import ConfigError, DatasetError, bounded, unknown
from gnomon.core.optional import import_optional
from gnomon.core.progress import show_progress
from gnomon.tasks import isolated
from gnomon.tasks.question import Question, digest


@dataclass(frozen=True)
@bounded("reasoning_gym", size="at least 1")
class ReasoningGymTask:
    """Questions of one reasoning-gym generator. A question is made when it is first asked for, and kept.

    reasoning-gym makes item i from ``seed + i``, so that sets with seeds 0 and 1 share all items but one. Here the seed
    is first spread over 31 bits: sets with different seeds are different.

    Attributes:
        generator: Name of the generator, such as "chain_sum".
        kind: "reasoning_gym".
        parameters: Settings of the generator, such as {"max_terms": 3}.
        suffix: Text after each question, such as how to write the answer. It is no part of the compared text.
        size: Number of questions.
        seed: Another seed gives other questions.

    Columns: ``answer`` (where the generator stores one), ``entry`` (the whole item, for its scorer), ``data_source`` =
    "reasoning_gym/NAME", ``parameters`` (where any are given; some scorers depend on them).
    Source: reasoning-gym 0.1.25.
    """

    generator: str
    kind: Literal["reasoning_gym"] = "reasoning_gym"
    parameters: dict[str, Any] = field(default_factory=dict)
    suffix: str = ""
    size: int = 1000
    seed: int = 0

    @property
    def name(self) -> str:
        """The generator's name."""
        return self.generator

    def questions(self) -> "ReasoningGym":
        """Return the questions.

        Raises:
            ConfigError: The generator or a parameter is unknown, or a value is refused; the message names the nearest
            name.
            DatasetError: The first question cannot be made.
        """
        questions = ReasoningGym(self, _create(self))
        # The first question is made at once: many generators refuse a setting only then.
        questions[0]
        return questions


class ReasoningGym:
    """The questions that a `ReasoningGymTask` describes."""

    def __init__(self, config: ReasoningGymTask, source: Any) -> None:
        self._config = config
        self._source = source
        self._made: dict[int, Question] = {}
        self._settings = digest(config.parameters)

    @property
    def name(self) -> str:
        """The generator's name."""
        return self._config.generator

    def __len__(self) -> int:
        return self._config.size

    def __getitem__(self, index: int) -> Question:
        number = range(len(self))[index]
        if number not in self._made:
            self._made[number] = self._question(number)
        return self._made[number]

    def _question(self, number: int) -> Question:
        try:
            entry = self._source[number]
        except DatasetError:
            # Raised by `_Isolated` with a message of its own.
            raise
        except Exception as error:
            raise DatasetError(
                f"reasoning-gym generator '{self.name}' could not make item {number} (seed "
                f"{self._config.seed}, parameters {self._config.parameters}): "
                f"{type(error).__name__}: {error}; change its parameters"
            ) from error
        text = str(entry["question"])
        columns = {"entry": isolated.json_safe(entry), "data_source": f"reasoning_gym/{self.name}"}
        if self._config.parameters:
            columns["parameters"] = isolated.json_safe(self._config.parameters)
        if entry["answer"] is not None:
            columns["answer"] = str(entry["answer"])
        name = f"{self.name}/{self._config.seed}/{number}/{self._settings}"
        return Question(name, text + self._config.suffix, text, columns)


class _Isolated:
    """Items of a generator that is deterministic only in a process of its own; made when one is asked for."""

    def __init__(self, config: ReasoningGymTask) -> None:
        self._config = config
        self._items: list[dict[str, Any]] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        c = self._config
        if not self._items:
            with show_progress(f"generating {c.size} questions of {c.generator}"):
                self._items = isolated.generate_in_subprocess(c.generator, c.parameters, spread(c.seed), c.size)
        return self._items[index]


def generators() -> tuple[str, ...]:
    """Return the names of all reasoning-gym generators that can be a task, sorted.

    Its "composite" is left out: a mixture of tasks does the same with any tasks.
    """
    return tuple(sorted(set(_registry()) - {"composite"}))


def generator_settings(generator: str) -> dict[str, Any]:
    """Return the parameters of a reasoning-gym generator with their defaults; None where there is no default.

    Raises:
        ConfigError: There is no such generator.
    """
    names = generators()
    if generator not in names:
        raise ConfigError(unknown("reasoning-gym generator", generator, names))
    own = [f for f in fields(_registry()[generator][1]) if f.name not in ("seed", "size")]
    given = {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in own}
    return {name: None if value is MISSING else value for name, value in given.items()}


def spread(seed: int) -> int:
    """Return a number in [0, 2^31 - 2^24) that depends on ``seed`` in every bit, with room to add an index.

    >>> spread(0) != spread(1)
    True
    """
    number = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big")
    return number % (2**31 - 2**24)


def _registry() -> Mapping[str, tuple[type, type]]:
    factory = import_optional("reasoning_gym.factory", "tasks", "a reasoning-gym task")
    registry: Mapping[str, tuple[type, type]] = factory.DATASETS
    return registry


def _create(config: ReasoningGymTask) -> Any:
    """Return the generator, its parameters checked."""
    if config.generator == "composite":
        raise ConfigError("reasoning-gym's 'composite' is not a task here; use kind = \"mixture\" with weighted parts")
    known = generator_settings(config.generator)
    make, settings = _registry()[config.generator]
    for parameter in config.parameters:
        if parameter in ("seed", "size"):
            raise ConfigError(f"{config.generator}: '{parameter}' belongs beside parameters, not among them")
        if parameter not in known:
            raise ConfigError(unknown(f"parameter of {config.generator}", parameter, known))
    try:
        made = make(settings(**config.parameters, seed=spread(config.seed), size=config.size))
    except Exception as error:
        defaults = ", ".join(f"{name} = {value!r}" for name, value in sorted(known.items()) if value is not None)
        raise ConfigError(
            f"reasoning-gym generator '{config.generator}' refuses {config.parameters}: "
            f"{error or type(error).__name__}; its defaults: {defaults}"
        ) from error
    return _Isolated(config) if config.generator in isolated.GENERATORS else made
