"""An engine of the user's own: refused before anything is loaded, in the protocol's words, or trained with."""

import asyncio
import math
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.random_model import RANDOM

from gnomon.config.experiment import load, to_toml, with_absolute_paths
from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.sections import EngineConfig
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.own import fault_of_draws, make_own, own_class, try_own
from gnomon.engines.pool import EnginePool
from gnomon.models.tiny import tiny_model
from gnomon.records.jsonl import read_rows
from gnomon.testing import TRIAL_CONFIG, trial_model, trial_snapshot
from gnomon.training.api import train_experiment
from gnomon.training.continuation import foreign_code, sources_of

EXAMPLE = "examples/own_engine.py:Generate"
TINY = ("steps=2", "rollouts_per_step=8", "algorithm.num_generations=2", "task.size=20", "grading.workers=1")


def test_an_engine_of_ones_own_trains(tmp_path: Path):
    """Two steps with the example, weights sent and proven each time; the record names its file."""
    train_experiment(load(RANDOM, [*TINY, f"engine={EXAMPLE}", "device=cpu"]), tmp_path / "run")

    assert len(list(read_rows(tmp_path / "run" / "metrics.jsonl"))) == 2
    written = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert written["engine"]["kind"].endswith(EXAMPLE)


def test_an_engine_of_ones_own_is_named_as_code_that_runs():
    """At the start, in the record by its digest, and by an absolute path from any folder."""
    experiment = load(RANDOM, [f"engine={EXAMPLE}"]).experiment

    assert f"engine {EXAMPLE}" in foreign_code(experiment)
    assert list(sources_of(experiment)) == ["examples/own_engine.py"]
    assert Path(with_absolute_paths(experiment).engine.kind.partition(":")[0]).is_absolute()
    assert load_again(to_toml(experiment)) == experiment.engine


def load_again(text: str) -> EngineConfig:
    return EngineConfig(**tomllib.loads(text)["engine"])


WHOLE = """
class Mine:
    version, beats = -1, 0
    def __init__(self, model, dtype, device, max_concurrent, depth=1): ...
    async def generate(self, prompt, keys, sampling): ...
    async def score(self, prompt, response, temperature): ...
    async def load(self, snapshot): ...
    async def fingerprints(self): ...
    async def close(self): ...
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import sys; sys.exit(0)", r"raised SystemExit\(0\)"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("import asyncio; raise asyncio.CancelledError", "raised CancelledError"),
        ("import os; os.chdir('/')", "changed the working directory or torch's default type"),
        (
            "import torch; torch.set_default_dtype(torch.bfloat16)",
            "changed the working directory or torch's default type",
        ),
        ("return [1]", r"fingerprints returns \[1\]; an engine has async def fingerprints"),
        ("return {'a': 7}", r"fingerprints returns \{'a': 7\}"),
        ("return {1: 7}", r"fingerprints returns \{1: 7\}"),
    ],
)
def test_what_would_end_or_change_more_than_a_call_is_an_error_of_the_engine(tmp_path: Path, line: str, said: str):
    """At once, in words: nobody waits for a thread that ended, and the learner computes in its own type and folder."""
    before = Path.cwd(), torch.get_default_dtype()
    (tmp_path / "mine.py").write_text(WHOLE.replace("fingerprints(self): ...", f"fingerprints(self): {line}"))
    engine = make_own("tiny", EngineConfig(kind=f"{tmp_path}/mine.py:Mine"), torch.float32, torch.device("cpu"))

    with pytest.raises(EngineError, match=said):
        asyncio.run(asyncio.wait_for(engine.fingerprints(), 60))
    assert (Path.cwd(), torch.get_default_dtype()) == before


def test_a_version_that_cannot_be_asked_for_is_refused_when_it_is_made(tmp_path: Path):
    """A property may raise whatever it likes."""
    (tmp_path / "mine.py").write_text(
        WHOLE.replace("version, beats = -1, 0", "beats, version = 0, property(lambda s: 1 / 0)")
    )

    with pytest.raises(ConfigError, match="could not be made: ZeroDivisionError"):
        make_own("tiny", EngineConfig(kind=f"{tmp_path}/mine.py:Mine"), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("async def score", "async def rate", r"has no method score; an engine has async def score\(self, prompt"),
        ("async def load", "def load", r"load is not async; an engine has async def load"),
        ("keys, sampling):", "keys):", r"generate too many positional arguments; .*one completion per key"),
        ("(self, snapshot)", "(self, snapshot, names)", r"load missing a required argument: 'names'"),
        ("max_concurrent, ", "", r"made with model, dtype, device, max_concurrent .*unexpected keyword"),
        ("class Mine:", "def Mine(): pass\nclass Other:", r"is function, and an engine is a class"),
        ("class Mine:", "class Others:", r"Mine"),
    ],
)
def test_a_wrong_engine_is_refused_in_the_words_of_the_protocol(tmp_path: Path, before: str, after: str, said: str):
    """What lacks or differs is named with the line that an engine has, before anything is loaded."""
    file = tmp_path / "mine.py"
    file.write_text(WHOLE.replace(before, after, 1))

    with pytest.raises(ConfigError, match=said):
        own_class(EngineConfig(kind=f"{file}:Mine"))


def test_settings_are_keyword_arguments_of_an_own_engine(tmp_path: Path):
    """A known one is accepted, an unknown one refused, and so is a secret, or a setting of gnomon's own engine."""
    file = tmp_path / "mine.py"
    file.write_text(WHOLE)
    assert own_class(EngineConfig(kind=f"{file}:Mine", settings={"depth": 2})).__name__ == "Mine"

    with pytest.raises(ConfigError, match="unexpected keyword argument 'width'"):
        own_class(EngineConfig(kind=f"{file}:Mine", settings={"width": 2}))
    with pytest.raises(ConfigError, match=r"settings.api_key would be written"):
        EngineConfig(kind=f"{file}:Mine", settings={"api_key": "abc"})
    with pytest.raises(ConfigError, match=r"engine.settings are for an engine of your own"):
        EngineConfig(settings={"depth": 2})
    with pytest.raises(ConfigError, match=r"'vlm'.* should be 'local', 'vllm', or an engine of your own"):
        EngineConfig(kind="vlm")


class Lying:
    """A local engine of tiny random weights whose answers are changed before they are returned."""

    def __init__(self, change: Callable[[Completion], Completion] = lambda done: done, **asked: Any) -> None:
        self._engine, self._change, self._asked = (
            LocalEngine(tiny_model(0, TRIAL_CONFIG), 4, shared=False),
            change,
            asked,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Answer with other keys or at another temperature, and say of it what ``change`` makes of it."""
        keys = self._asked.get("keys", lambda keys: keys)(keys)
        at = replace(sampling, temperature=sampling.temperature * self._asked.get("factor", 1.0))
        found = await self._engine.generate(prompt, keys, at)
        told = [await self._engine.score(prompt, done.tokens, sampling.temperature) for done in found]
        honest = [replace(d, logprobs=tuple(t), full_logprobs=tuple(t)) for d, t in zip(found, told, strict=True)]
        return [self._change(done) for done in honest]


def saying(value: Callable[[float], float]) -> Callable[[Completion], Completion]:
    """Return what makes an answer say other log-probabilities."""

    def change(done: Completion) -> Completion:
        said = tuple(value(one) for one in done.logprobs)
        return replace(done, logprobs=said, full_logprobs=said)

    return change


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (lambda: Lying(), None),
        (lambda: Lying(saying(lambda one: 0.0)), r"log-probabilities 0, 0, 0 of tokens that score gives -\d"),
        (lambda: Lying(saying(lambda one: one / math.log(10))), "natural logarithms"),
        (lambda: Lying(saying(lambda one: one / math.log(2))), "natural logarithms"),
        (lambda: Lying(saying(math.exp)), "above 0"),
        (lambda: Lying(keys=lambda keys: [7 for _ in keys]), "8 keys have 1 different answers"),
        (lambda: Lying(keys=lambda keys: [key // 2 for key in keys]), "8 keys have 4 different answers"),
        (lambda: Lying(keys=lambda keys: [key % 3 for key in keys]), "8 keys have 3 different answers"),
        (lambda: Lying(factor=0), "different answers at temperature"),
        (lambda: Lying(factor=0.3), "draws are likelier at temperature 0"),
        (lambda: Lying(factor=4.0), "draws are likelier at temperature"),
        (lambda: Lying(lambda done: replace(done, tokens=())), "no token"),
    ],
)
def test_an_engine_that_lies_of_its_draws_is_found_out(engine: Callable[[], Any], said: str | None, temperature: float):
    """Log-probabilities of 0 or to another base, one answer for several keys, draws of another temperature."""

    async def found() -> str | None:
        made = engine()
        await made.load(sharp_snapshot())
        fault = await fault_of_draws(made, [256, 50, 43], temperature)
        await made.close()
        return fault

    fault = asyncio.run(found())
    assert (fault is None) == (said is None), fault
    assert said is None or re.search(said, fault or "")


def sharp_snapshot() -> Snapshot:
    """Weights of a model that prefers some tokens, as a trained one does; random ones prefer none."""
    return Snapshot(0, lambda: ((name, 1.3 * tensor) for name, tensor in trial_snapshot(0).tensors()))


OWN = """
import time
from examples.own_engine import Generate

class Stale(Generate):
    async def load(self, snapshot):
        self.version = snapshot.version
    async def fingerprints(self):
        return None

class StaleAnswers(Generate):
    def __init__(self, **given):
        super().__init__(**given)
        self.first = Generate(**given)
    async def generate(self, prompt, keys, sampling):
        self.first.version = self.version
        return await self.first.generate(prompt, keys, sampling)

class Blocking(Generate):
    async def generate(self, prompt, keys, sampling):
        time.sleep(1000)

class Unkeyed(Generate):
    calls = 0
    async def generate(self, prompt, keys, sampling):
        self.calls += 1000
        return await super().generate(prompt, [key + self.calls for key in keys], sampling)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("Stale", ConfigError, r"tried before training: engine own-0 has the weights of version 1 as far as it can"),
        ("StaleAnswers", ConfigError, r"the weights that were loaded last; an engine has async def generate"),
        ("Blocking", EngineError, r"own-0: it finished nothing in 2 seconds \(engine.timeout_seconds\)"),
    ],
)
def test_an_engine_is_tried_before_a_step(tmp_path: Path, kind: str, error: type[Exception], said: str):
    """Weights that were never taken in, and a coroutine that blocks, end before anything was learned."""
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    settings = [*TINY, f"engine={file}:{kind}", "device=cpu", "engine.timeout_seconds=2"]

    with pytest.raises(error, match=said):
        train_experiment(load(RANDOM, settings), tmp_path / "run")
    assert not any(file.read_text() for file in (tmp_path / "run").glob("metrics.jsonl"))


def made(folder: Path, kind: str, timeout_seconds: float = 60.0) -> EnginePool:
    """A pool of one engine of the file, as a run has it."""
    file = folder / "mine.py"
    file.write_text(OWN)
    plan = EngineConfig(kind=f"{file}:{kind}")
    engine = make_own(trial_model(), plan, torch.float32, torch.device("cpu"))
    return EnginePool({"own-0": engine}, timeout_seconds, 259)


def test_a_coroutine_that_blocks_is_lost_in_time(tmp_path: Path):
    """It has a thread of its own, so whoever waits for it is told after engine.timeout_seconds."""

    async def body() -> None:
        pool = made(tmp_path, "Blocking", timeout_seconds=0.3)
        with pytest.raises(EngineError, match=r"own-0: it finished nothing in 0.3 seconds \(engine.timeout_seconds\)"):
            await pool.generate([65], [0], Sampling(max_completion_length=4))
        await pool.close()

    asyncio.run(body())


@pytest.mark.parametrize(("kind", "is_said"), [("Generate", False), ("Unkeyed", True)])
def test_an_engine_that_draws_by_a_number_of_its_own_is_told_of(tmp_path: Path, kind: str, is_said: bool):
    """Its answers are right, and a resumed run would have others."""

    async def body() -> str | None:
        pool = made(tmp_path, kind)
        await pool.load(trial_snapshot(0))
        said = await try_own(kind, pool, [256, 50, 43], Sampling(), 0.25)
        await pool.close()
        return said

    said = asyncio.run(body())
    assert ("draws another token under the same key" in (said or "")) == is_said
