"""A model's own code runs where that model is trusted and nowhere else, and a run goes on with the code that it began
with alone.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError, ModelError
from gnomon.models.critic import check_critic, load_critic
from gnomon.models.load import check_model, load_tokenizer, write_model
from gnomon.models.lora import merged_tensors
from gnomon.models.remote_code import revision
from gnomon.models.tiny import tiny_model

CONFIG = """
import pathlib
from transformers import LlamaConfig

with open({mark!r}, "a") as mark:
    mark.write("{word}")


class OwnConfig(LlamaConfig):
    model_type = "own"
"""
POLICY = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""
CRITIC = """
from torch import nn
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

from .configuration_own import OwnConfig


class Own(LlamaPreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()
"""
SMALL = ("steps=1", "rollouts_per_step=8", "algorithm.num_generations=2", "held_out.size=2", "task.size=20",
         "evaluation.before=false", "grading.workers=1", "checkpoints.every=1")  # fmt: skip


def write_code(folder: Path, word: str, model: str = POLICY) -> None:
    """Write the code of a model, which leaves a word in a file beside the folder whenever it runs."""
    (folder / "configuration_own.py").write_text(CONFIG.format(mark=str(mark_of(folder)), word=word))
    (folder / "modeling_own.py").write_text(model)


def mark_of(folder: Path) -> Path:
    """Return where its code leaves its word."""
    return folder.with_name(f"{folder.name}-ran")


def own_config(folder: Path, use: str) -> None:
    """Let the config of a folder name its own code for one use."""
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "configuration_own.OwnConfig", use: "modeling_own.Own"}
    config |= {"model_type": "own", "architectures": ["OwnFor" + use.partition("For")[2]], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A tiny model with code of its own."""
    folder, model = tmp_path / "policy", tiny_model()
    write_model(merged_tensors(model), model.config, folder)
    load_tokenizer("tiny").save(folder)
    write_code(folder, "p")
    own_config(folder, "AutoModelForCausalLM")
    return folder


@pytest.fixture
def critic(tmp_path: Path) -> Path:
    """A tiny reward model with code of its own."""
    folder = tmp_path / "critic"
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=259, num_labels=1, pad_token_id=258, **shape)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    write_code(folder, "c", CRITIC)
    own_config(folder, "AutoModelForSequenceClassification")
    return folder


def test_a_revision_is_of_every_python_file(policy: Path):
    """One byte, or another name, is another revision; weights are none of it; a model without code has none."""
    first = revision(str(policy))
    (policy / "model.safetensors").write_bytes(b"")
    assert revision(str(policy)) == first
    (policy / "modeling_own.py").rename(policy / "modeling_other.py")
    second = revision(str(policy))
    (policy / "configuration_own.py").write_bytes((policy / "configuration_own.py").read_bytes() + b"\n")

    assert first.startswith("sha256 ")
    assert len({first, second, revision(str(policy))}) == 3
    assert revision("tiny") == revision("nobody/nothing") == revision(str(policy.parent / "nowhere")) == ""
    assert not mark_of(policy).exists()


def test_code_that_lies_in_another_repository_is_named(policy: Path):
    """With its commit in the local cache, or that none is known."""
    config = json.loads((policy / "config.json").read_text())
    config["auto_map"]["AutoTokenizer"] = ["someone/else--tokenization.Own", None]
    (policy / "config.json").write_text(json.dumps(config))

    assert revision(str(policy)).endswith(", someone/else of no known commit")


def test_a_commit_of_the_hub_s_cache_is_a_revision(tmp_path: Path):
    """The config of a cached model lies in a folder named after its commit; nothing is fetched, and nothing run."""
    code = (
        "import sys; from gnomon.models.remote_code import revision\n"
        "print(revision('some/model'), '|', revision('some/plain'))"
    )
    for name, config in (("model", {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}), ("plain", {})):
        repository = tmp_path / "hub" / f"models--some--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0123abcd")
        (repository / "snapshots" / "0123abcd").mkdir(parents=True)
        (repository / "snapshots" / "0123abcd" / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert said.stdout == "commit 0123abcd | \n"


def test_each_model_is_trusted_by_itself(policy: Path, critic: Path):
    """Trust in the policy is none in the critic, nor the other way round; the message names the key."""
    with pytest.raises(
        ModelError, match=r"policy' brings its own code, which is not run; .* set trust_remote_code = tr"
    ):
        check_model(str(policy))
    for trusts_policy, trusts_critic, key in ((True, False, r"algorithm\.critic\.trust"), (False, True, r"set trust")):
        with pytest.raises(ModelError, match=rf"brings its own code.*{key}_remote_code = true"):
            check_critic(str(policy), str(critic), trusts_policy, trusts_critic)
    assert "c" not in (mark_of(policy).read_text() if mark_of(policy).exists() else "")


def test_a_trusted_critic_beside_an_untrusted_policy_loads(critic: Path):
    """Its code runs, and is told and recorded by its own name."""
    network = load_critic("tiny", str(critic), trusts_initial=True)
    options = [f"algorithm.critic.initial={critic}", "algorithm=ppo", "algorithm.critic.trust_remote_code=true"]

    assert type(network).__name__ == "Own"
    assert mark_of(critic).read_text().startswith("c")
    assert load("tiny", options).experiment.trust_remote_code is False
    with pytest.raises(ConfigError, match=r"this critic begins as the policy.*remove algorithm\.critic\.trust_remote"):
        load("tiny", ["algorithm=ppo", "algorithm.critic.trust_remote_code=true"])


def test_a_run_goes_on_with_the_code_that_it_trusted(tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]):
    """Its revision is printed and in the card; other code is refused before it runs; the former one goes on."""
    run, trusted = tmp_path / "run", revision(str(policy))
    several = ["steps=2", *SMALL[1:], "checkpoints.keep_last=2"]
    command = ["train", "tiny", f"model={policy}", "trust_remote_code=true", *several, "--run-dir", str(run)]
    assert main(command) == 0
    assert f"the own code of the model {policy} may run (trust_remote_code): {trusted}" in capsys.readouterr().err
    assert json.loads((run / "run.json").read_text())["trusted_models"] == {str(policy): trusted}
    shutil.rmtree(run / "checkpoints" / "step-2")
    kept = {path.name: path.read_bytes() for path in policy.glob("*.py")}
    mark_of(policy).unlink()
    write_code(policy, "changed")

    assert main(["resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"is not what this run trusted so far: that was {trusted}, and it is {revision(str(policy))} now" in said
    assert not mark_of(policy).exists()
    for name, content in kept.items():
        (policy / name).write_bytes(content)
    assert main(["resume", str(run)]) == 0
