"""Adapters are saved as such, and a run or an evaluation begins with one: peft's own, or a checkpoint's."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError, GnomonError, ModelError
from gnomon.models.adapter_config import LoraConfig, other_base, read_adapter_config
from gnomon.models.checkpoint_check import try_checkpoint
from gnomon.models.load import adapter_tokenizer, load_model, load_tokenizer
from gnomon.models.lora import adapt
from gnomon.models.tiny import save_tiny, tiny_model, tiny_tokenizer
from gnomon.training.api import export, resume, train_experiment
from gnomon.training.python_api import evaluate

COMMON = (
    "rewards=[{kind='format', pattern='[!-P].*'}]", "rollouts_per_step=16", "algorithm.num_generations=4",
    "task.size=40", "held_out.size=4", "checkpoints.every=1", "checkpoints.keep_last=9",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two steps that trained adapters on a base in a folder."""
    folder = tmp_path_factory.mktemp("adapters")
    base = save_tiny(folder / "base", seed=3)
    train_experiment(load("tiny", [f"model={base}", "steps=2", "lora.rank=4", *COMMON]), folder / "run")
    return folder / "run"


def _adapter(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step}" / "adapter"


def test_a_checkpoint_has_its_adapter_as_peft_reads_it(trained: Path):
    """Base and adapter, put together by peft, give the logits of the merged model beside it."""
    import peft
    from transformers import AutoModelForCausalLM

    config = json.loads((_adapter(trained, 2) / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(trained.parent / "base"))
    plain: Any = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32)
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        whole: Any = peft.PeftModel.from_pretrained(plain, str(_adapter(trained, 2)))
        after = whole(input_ids=ids).logits
        merged: Any = load_model(str(trained / "checkpoints" / "step-2"), torch.float32)
        torch.testing.assert_close(after, merged(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-5)


def test_an_adapter_is_exported_as_the_model_that_it_makes(trained: Path, tmp_path: Path):
    """Weights and tokenizer are those of the checkpoint in which base and adapter are merged."""
    folder = export(_adapter(trained, 2), tmp_path / "model")
    there, here = (load_file(place / "model.safetensors") for place in (trained / "checkpoints" / "step-2", folder))

    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert load_tokenizer(str(folder)).encode("3+4=") == tiny_tokenizer().encode("3+4=")
    with pytest.raises(ModelError, match="does not name its base model"):
        export(_changed(_adapter(trained, 2), tmp_path / "other", base_model_name_or_path=None), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_what_lies_beside_an_adapter_and_its_base_is_exported(trained: Path, tmp_path: Path):
    """A chat template of the adapter's own, with which it is not trained or evaluated as its base; the base's files."""
    base = shutil.copytree(trained.parent / "base", tmp_path / "base")
    (base / "preprocessor_config.json").write_text("{}")
    adapter = _changed(_adapter(trained, 2), tmp_path / "adapter", base_model_name_or_path=str(base))
    tokenizer = tiny_tokenizer()
    tokenizer.save(adapter)
    assert adapter_tokenizer(adapter, tokenizer) is None
    tokenizer.backend.chat_template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    tokenizer.save(adapter)

    exported = export(adapter, tmp_path / "model")
    assert load_tokenizer(str(exported)).backend.chat_template == tokenizer.backend.chat_template
    assert (exported / "preprocessor_config.json").is_file()
    said = r"another chat template than '.*base' has.*; type gnomon export .*adapter FOLDER and set model = FOLDER"
    with pytest.raises(ModelError, match=said):
        train_experiment(load("tiny", [f"model={adapter}", *COMMON]), tmp_path / "run")
    with pytest.raises(ModelError, match=said):
        evaluate(adapter, task="arithmetic", prompts=1)
    text = (adapter / "tokenizer.json").read_text()
    (adapter / "tokenizer.json").write_text(text.replace('"!"', '"swap"').replace('"#"', '"!"').replace("swap", "#"))
    with pytest.raises(ModelError, match="has another tokenizer than its base: token 33 is '!' and there '#'"):
        export(adapter, tmp_path / "none")


def test_training_begins_with_an_adapter(trained: Path, tmp_path: Path):
    """``model`` may be the adapter's folder: its base and settings are taken, and its weights go on; resume too."""
    loaded = load("tiny", [f"model={_adapter(trained, 2)}", "steps=0", *COMMON])
    base, own = str(trained.parent / "base"), loaded.experiment.lora
    assert (loaded.experiment.model, own and own.rank, own and own.adapter) == (base, 4, str(_adapter(trained, 2)))
    assert any("is an adapter: model = " in note for note in loaded.notes)
    begun = train_experiment(loaded, tmp_path / "begun").directory
    there, here = (load_file(_adapter(run, n) / "adapter_model.safetensors") for run, n in ((trained, 2), (begun, 0)))
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)

    named = [f"model={base}", f"lora.adapter={_adapter(trained, 2)}", "steps=2", *COMMON]
    run = train_experiment(load("tiny", named), tmp_path / "run").directory
    shutil.rmtree(run / "checkpoints" / "step-2")
    written = (run / "metrics.jsonl").read_text().splitlines()
    resume(run)
    again = (run / "metrics.jsonl").read_text().splitlines()
    rewards = [[json.loads(row)["rollout/reward_mean"] for row in rows] for rows in (written, again)]
    assert rewards[0] == rewards[1]


def test_an_adapter_is_evaluated_as_the_model_that_it_makes(trained: Path):
    """The scores, and the lengths of answers, are those of the merged checkpoint."""
    alone, whole = (
        evaluate(place, task="arithmetic", samples=2, prompts=8, overrides=("sampling.max_completion_length=8",))
        for place in (_adapter(trained, 2), trained / "checkpoints" / "step-2")
    )
    whole_alone = r"engine.kind = 'vllm' loads whole models, and '.*adapter' is an adapter"
    with pytest.raises(ConfigError, match=whole_alone if find_spec("vllm") else "not installed: vllm"):
        evaluate(_adapter(trained, 2), task="arithmetic", overrides=("engine=vllm",))
    drop = ("model", "seconds", "slow")
    assert {k: v for k, v in alone.as_row().items() if k not in drop} == {
        k: v for k, v in whole.as_row().items() if k not in drop
    }


def test_an_adapter_keeps_the_base_that_it_was_trained_on(trained: Path, tmp_path: Path):
    """Trained on quantized weights it is read, continued and exported on those; another base is said at the start."""
    base, kind = trained.parent / "base", "nf4"
    begun = ["steps=1", "held_out.size=0", *COMMON]
    run = train_experiment(
        load("tiny", [f"model={base}", "lora.rank=4", f"lora.base={kind}", *begun]), tmp_path / "run"
    )
    adapter = _adapter(run.directory, 1)
    loaded = load("tiny", [f"model={adapter}", "steps=0", *COMMON])
    assert loaded.experiment.lora is not None
    assert loaded.experiment.lora.base == kind
    assert f"lora.base = '{kind}', which the adapter was trained on" in loaded.notes
    whole, own = (
        load_file(folder / "model.safetensors")
        for folder in (run.directory / "checkpoints" / "step-1", export(adapter, tmp_path / "model"))
    )
    assert all(torch.equal(whole[name], own[name]) for name in whole)

    other = load("tiny", [f"model={base}", f"lora.adapter={adapter}", "lora.base=unquantized", *COMMON]).experiment
    assert other.lora is not None
    assert other.lora.base == "unquantized"
    said = try_checkpoint(str(base), tiny_tokenizer(), lora=other.lora).said
    assert any(f"was trained on a base stored as '{kind}'" in sentence for sentence in said)
    plain = LoraConfig(rank=4, adapter=str(_adapter(trained, 2)))
    assert other_base(plain) is None
    assert other_base(replace(plain, base="int8")) is not None


def _changed(adapter: Path, folder: Path, **settings: Any) -> Path:
    copy = shutil.copytree(adapter, folder)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    return copy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "has DoRA, and plain LoRA adapters are read; merge it"),
        ({"peft_type": "IA3"}, "an adapter of kind IA3"),
        ({"init_lora_weights": "pissa"}, "which changes the base"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"base_model_name_or_path": None}, r"does not name its base model; type model=BASE lora.adapter="),
        ({"r": "x"}, "r is 'x', and should be"),
        ({"alora_invocation_tokens": [3, 4]}, "an adapter that begins at a token"),
        ({"use_qalora": True}, "has use_qalora = True, and plain"),
        ({"arrow_config": {"top_k": 3}}, "has arrow_config = {'top_k': 3}, and plain"),
        ({"a_way_of_tomorrow": ["x"]}, r"has a_way_of_tomorrow = \['x'\]"),
    ],
)
def test_what_is_no_plain_adapter_is_refused(trained: Path, tmp_path: Path, settings: dict[str, Any], message: str):
    """Before anything is loaded, with what to do."""
    with pytest.raises(GnomonError, match=message):
        load("tiny", [f"model={_changed(_adapter(trained, 2), tmp_path / 'other', **settings)}"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop(min(held)), r"lacks model.layers.0.mlp.down_proj.lora_A.weight, .* ask for it"),
        (
            lambda held: held.update({"base_model.model.lm_head.weight": torch.zeros(2, 2)}),
            "lm_head.weight, which is no",
        ),
        (
            lambda held: held.update({"base_model.model.model.norm.lora_A.weight": torch.zeros(4, 64)}),
            r"not of this model: .* is \[4, 64\], and model.norm is \[64\]",
        ),
        (lambda held: [held.update({f"{n}.x": held.pop(n)}) for n in [*held]], "weight.x, which is no plain adapter"),
    ],
)
def test_an_adapter_whose_weights_are_not_its_targets_is_refused_in_the_plan(trained, tmp_path, change, message):
    """A weight that lacks would begin at random, and whole ones beside the adapter would be lost."""
    copy = _changed(_adapter(trained, 2), tmp_path / "other")
    held = load_file(copy / "adapter_model.safetensors")
    change(held)
    save_file(held, copy / "adapter_model.safetensors")
    loaded = load("tiny", [f"model={copy}", *COMMON]).experiment
    with pytest.raises(ModelError, match=message):
        try_checkpoint(loaded.model, tiny_tokenizer(), lora=loaded.lora)


def test_layers_that_an_adapter_is_of_are_its_targets(trained: Path, tmp_path: Path):
    """peft's layers_to_transform chooses layers, and the names of its weights say which."""
    copy = _changed(_adapter(trained, 2), tmp_path / "other", layers_to_transform=[0])
    held = load_file(copy / "adapter_model.safetensors")
    save_file({n: t for n, t in held.items() if ".layers.0." in n}, copy / "adapter_model.safetensors")
    assert all(".layers.0." in f".{target}" for target in read_adapter_config(copy)[1]["targets"])


def test_an_adapter_of_another_model_is_refused(trained: Path, tmp_path: Path):
    """By shapes and names, before the model is loaded; other settings beside it are refused too."""
    copy = _changed(_adapter(trained, 2), tmp_path / "other")
    tensors = load_file(copy / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: torch.zeros(4, 7)}, copy / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"is not of this model: .* is \[4, 7\]"):
        train_experiment(load("tiny", [f"model={copy}", "steps=1", *COMMON]), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"lora.rank = 8, and the adapter .* has 4; leave it out"):
        load("tiny", [f"model={copy}", f"lora={{adapter='{copy}', rank=8}}"])
    (copy / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model.safetensors; save it with safetensors"):
        train_experiment(load("tiny", [f"model={copy}", "steps=1", *COMMON]), tmp_path / "run")


def test_rank_stabilized_adapters_have_the_same_scale(trained: Path, tmp_path: Path):
    """alpha / sqrt(rank) is read as an alpha that gives that scale; all-linear ones by the names in their weights."""
    copy = _changed(
        _adapter(trained, 2), tmp_path / "other", use_rslora=True, lora_alpha=6, target_modules="all-linear"
    )
    _, table = read_adapter_config(copy)
    assert LoraConfig(**{**table, "targets": tuple(table["targets"])}).scale == pytest.approx(3.0)
    model = adapt(tiny_model(3), LoraConfig(**{**table, "targets": tuple(table["targets"])}))
    assert sum("lora_A" in name for name, _ in model.named_parameters()) * 2 == len(
        load_file(copy / "adapter_model.safetensors")
    )
