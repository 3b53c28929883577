"""Names are checked before torch is imported, and no right one is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gnomon.algorithms import PRESETS
from gnomon.config.experiment import load
from gnomon.config.reading import built_in, check_names
from gnomon.config.reference import as_names
from gnomon.core.errors import ConfigError

NAMES = Path(__file__).parents[2] / "src" / "gnomon" / "config" / "known_names.json"
PROGRAM = """
import sys
from gnomon.cli.main import main
code = main(sys.argv[1:])
print(code, *sorted({"torch", "transformers", "numpy"} & set(sys.modules)), file=sys.stdout)
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "quickstrat"], "did you mean 'quickstart'"),
        (["train", "tiny", "algorithm=grop"], "did you mean 'grpo'"),
        (["plan", "tiny", "--stpes", "3"], "did you mean 'steps'"),
        (["plan", "tiny", "learner.optimiser.learning_rate=1"], "did you mean 'optimizer'"),
        (["train", "tiny", "task=arithmetik"], "did you mean 'arithmetic'"),
        (["train", "tiny", 'rewards=["numerik"]'], "did you mean 'numeric'"),
        (["train", "tiny", "engine=vlm"], "should be 'local', 'vllm', or an engine of your own"),
        (["train", "tiny", "model=./gone"], "model folder './gone' does not exist"),
        (["train", "tiny", "fp16=true"], "names of another library"),
        (["compare", "tiny", "--algorithms", "grpo,grop", "--steps", "1"], "did you mean 'grpo'"),
        (["train", "tiny", "model="], "neither a folder, nor the name of a model"),
        (["plan", "tiny", "model=https://hub/org/name"], "neither a folder, nor the name of a model"),
        (["no-such-verb"], "unknown verb"),
        (["report", "gone"], "there is no run gone"),
        (["report", "x" * 3000], "there is no run xxx"),
        (["resume", "x" * 3000], "there is no run xxx"),
        (["doctor", "runs/gone"], "there is no run runs/gone"),
        (["resume", "gone"], "there is no run gone"),
        (["export", "gone", "there"], "there is no run gone"),
        (["watch", "gone", "--once"], "there is no run gone"),
        (["evaluate", "runs/gone"], "there is no folder runs/gone"),
        (["rewards", "numerik"], "did you mean 'numeric'"),
    ],
)
def test_a_wrong_name_is_refused_without_torch(arguments: list[str], said: str, tmp_path: Path):
    """Exit code 2 and the nearest name, and neither torch, transformers nor numpy was imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
    )

    assert said in done.stderr
    assert done.stdout.split() == ["2"]


def test_the_names_are_those_of_the_code():
    """known_names.json is up to date: `gnomon config --names > src/gnomon/config/known_names.json` writes it."""
    assert json.loads(NAMES.read_text()) == json.loads(as_names())


@pytest.mark.parametrize("name", sorted(built_in()))
@pytest.mark.parametrize("preset", [*PRESETS, "GRPO", "reinforce++", "A*-PO"])
def test_no_right_name_is_refused(name: str, preset: str):
    """Every recipe with every preset, however it is spelled, passes."""
    check_names(name, [f"algorithm={preset}", "algorithm.num_generations=4"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine=vllm", "cluster=ray", "lora.rank=4"],
        ["lora={}", "max_staleness=measured", "chat_template_kwargs.enable_thinking=false"],
        ["task=rows.jsonl", "rewards=['mine.py:f', 'numeric']"],
        ["task=org/name", "task.split=test"],
        ["task=livecodebench@2024-08-01"],
        ["task=AIME_24"],
        ["task=chain_sum", "task.parameters.max_terms=3"],
        ["evaluation.task=gsm8k", "evaluation.sampling.temperature=0.6"],
        ["algorithm=mine.py:ALGORITHM"],
        ["algorithm.surrogate.trust.high=0.3", "n=4", "trainer.save_freq=5"],
        ["records.sinks=['wandb']", "learner.optimizer={learning_rate=1e-3}"],
        ['rewards=[{kind="numeric", weight=2.0}]', 'environment={kind="class", use="mine.py:Own"}'],
        ["model=org/model", "held_out.size=0"],
    ],
)
def test_what_may_be_right_passes(overrides: list[str]):
    """Names of files, code of the user's, datasets on the hub, pieces and kinds are judged by whoever reads them."""
    check_names("tiny", overrides)


def test_both_checks_say_the_same_of_a_misspelt_key():
    """Whichever is first, the message is the same."""
    said = []
    for check in (check_names, load):
        with pytest.raises(ConfigError) as error:
            check("tiny", ["algorithm=grop"])
        said.append(str(error.value))

    assert said[0] == said[1]
