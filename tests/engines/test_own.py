"""An engine of the user's own: refused before anything is loaded, in the protocol's words, or trained with."""

import tomllib
from pathlib import Path

import pytest

from gnomon.config.experiment import anchored, load, to_toml
from gnomon.core.errors import ConfigError
from gnomon.core.sections import EngineConfig
from gnomon.engines.own import own_class
from gnomon.records.jsonl import read_rows
from gnomon.training.api import train_experiment
from gnomon.training.provenance import foreign_code, sources_of

EXAMPLE = "examples/own_engine.py:Generate"
TINY = ("steps=2", "rollouts_per_step=8", "algorithm.num_generations=2", "task.size=20", "grading.workers=1")


def test_an_engine_of_ones_own_trains(tmp_path: Path):
    """Two steps with the example, weights sent and proven each time; the record names its file."""
    train_experiment(load("tiny", [*TINY, f"engine={EXAMPLE}", "device=cpu"]), tmp_path / "run")

    assert len(list(read_rows(tmp_path / "run" / "metrics.jsonl"))) == 2
    written = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert written["engine"]["kind"].endswith(EXAMPLE)


def test_an_engine_of_ones_own_is_named_as_code_that_runs():
    """At the start, in the record by its digest, and by an absolute path from any folder."""
    experiment = load("tiny", [f"engine={EXAMPLE}"]).experiment

    assert f"engine {EXAMPLE}" in foreign_code(experiment)
    assert list(sources_of(experiment)) == ["examples/own_engine.py"]
    assert Path(anchored(experiment).engine.kind.partition(":")[0]).is_absolute()
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
