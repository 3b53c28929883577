import json
import os
import shutil

import pytest
import torch
import transformers as hf

from gnomon.core.errors import ConfigError, ModelError
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.checkpoint_check import check_written, try_checkpoint
from gnomon.models.folder import belongings_of, savable
from gnomon.models.load import load_model, load_tokenizer, write_model
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, save_tiny


@pytest.fixture
def folder(tmp_path):
    """A tiny model as a Hugging Face folder."""
    return save_tiny(tmp_path / "model", seed=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_sample": False, "temperature": 0.9},
        {"do_sample": False, "top_p": 0.6},
        {"do_sample": False, "top_k": 5},
        {"do_sample": False, "min_p": 0.1},
        {"typical_p": 0.4, "epsilon_cutoff": 0.1, "eta_cutoff": 0.2},
        {"num_beams": 1, "early_stopping": True},
        {"num_beams": 1, "length_penalty": 2.0},
        {"pad_token_id": -1},
        {"do_sample": False, "temperature": 0.9, "num_beams": 1, "early_stopping": True, "output_scores": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_generation_config_that_is_read_is_also_written(folder, tmp_path, wrong):
    """What transformers reads and would not save is repaired, said once, and keeps its ends."""
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [257, 258], "bos_token_id": 256} | wrong)
    )

    said = try_checkpoint(str(folder), load_tokenizer(str(folder))).said
    model = load_model(str(folder), torch.float32)
    write_model(merged_tensors(model), model.config, tmp_path / "written", model.generation_config)

    assert len(said) == 1
    assert all(name in said[0] for name in wrong if name not in ("do_sample", "num_beams", "output_scores"))
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    assert again.generation_config.eos_token_id == [257, 258]
    assert again.generation_config.bos_token_id == 256


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_return_sequences": 3},
        {"max_new_tokens": -5},
        {"early_stopping": "perhaps"},
        {"cache_implementation": "quick"},
        {"streamer": 1},
        {"watermarking_config": {"x": 1}},
    ],
    ids=str,
)
def test_a_generation_config_that_is_not_read_is_refused(folder, wrong):
    """What transformers does not take at all is named before anything is loaded."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257} | wrong))
    with pytest.raises(ModelError, match=r"does not take its generation_config.json \(.*correct the file, or remove"):
        load_tokenizer(str(folder))


def test_a_generation_config_that_can_be_written_stays_as_it_is():
    """Sampling settings beside do_sample = true are nobody's fault."""
    given = hf.GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, eos_token_id=[1, 2])
    kept, dropped = savable(given)
    assert dropped == ()
    assert kept.to_dict() == given.to_dict()


@pytest.mark.parametrize("misplaced", [{"temperature": 0.7}, {"top_p": 0.9, "max_new_tokens": 7}])
def test_what_belongs_to_generation_leaves_the_config_when_it_is_written(folder, tmp_path, misplaced):
    """An older config.json that holds sampling settings is read, and written in two files."""
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | misplaced))

    try_checkpoint(str(folder), load_tokenizer(str(folder)))
    model = load_model(str(folder), torch.float32)
    write_model(merged_tensors(model), model.config, tmp_path / "written", model.generation_config)

    hf.AutoModelForCausalLM.from_pretrained(tmp_path / "written")


CARRIED = {
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "video_preprocessor_config.json": "{}",
    "chat_template.json": "{}",
    "vocab.json": "{}",
    "merges.txt": "#version",
    "added_tokens.json": "{}",
    "spiece.model": "model",
    "tekken.json": "{}",
    "qwen.tiktoken": "a",
    "additional_chat_templates/rag.jinja": "{{ messages }}",
    "LICENSE": "free",
}
LEFT = (
    "README.md",
    "secrets.json",
    "credentials.json",
    "token.json",
    ".env.json",
    "model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "trainer_state.json",
    "adapter_config.json",
    "modeling_own.py",
    "video.mp4",
    "sub/processor_config.json",
)


def put(folder, name, content="x"):
    """Write a file in a folder."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)


def test_what_lies_beside_the_weights_goes_along(tmp_path):
    """Processor files, templates, vocabularies and licenses; no weights, README, code, secrets or other folders."""
    folder, target = tmp_path / "model", tmp_path / "checkpoint"
    folder.mkdir()
    target.mkdir()
    for name, content in CARRIED.items():
        put(folder, name, content)
    for name in LEFT:
        put(folder, name)
    (target / "vocab.json").write_text("the tokenizer's own")

    found = belongings_of(folder)
    found.write(target)

    assert set(found.files) == set(CARRIED)
    assert found.left_out == ()
    assert (target / "additional_chat_templates" / "rag.jinja").read_text() == "{{ messages }}"
    assert (target / "vocab.json").read_text() == "the tokenizer's own"
    assert "modeling_own.py" in belongings_of(folder, with_code=True).files


def test_what_is_too_large_or_leads_outside_is_left_out_and_said(tmp_path):
    """A link out of the folder and a file of 65 MiB are named and not read; a link inside is followed."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.json").write_text("{}")
    (folder / "processor_config.json").symlink_to(tmp_path / "outside.json")
    (folder / "inner_config.json").write_text("{}")
    (folder / "preprocessor_config.json").symlink_to("inner_config.json")
    with open(folder / "huge.json", "wb") as huge:
        os.truncate(huge.fileno(), 65 << 20)

    found = belongings_of(folder)

    assert found.left_out == ("huge.json", "processor_config.json")
    assert set(found.files) == {"inner_config.json", "preprocessor_config.json"}


@pytest.mark.parametrize(
    "shape", [TinyConfig(), TinyConfig(architecture="qwen3_moe"), TinyConfig(architecture="olmoe")]
)
def test_a_checkpoint_is_loaded_again_before_the_first_step(tmp_path, shape):
    """Its form without weights, and with weights the same numbers and logits."""
    folder = save_tiny(tmp_path / "model", config=shape)
    tokenizer = load_tokenizer(str(folder))
    assert try_checkpoint(str(folder), tokenizer).said == ()

    model = load_model(str(folder), torch.float32)
    write_model(merged_tensors(model), model.config, tmp_path / "written", model.generation_config)
    check_written(tmp_path / "written", str(folder), torch.float32)


def test_built_in_models_are_rehearsed_too():
    """There is no folder, and nothing belongs to them."""
    form = try_checkpoint("tiny", load_tokenizer("tiny"))
    assert (form.said, dict(form.belongings.files)) == ((), {})


def test_a_checkpoint_that_holds_other_numbers_is_refused(folder, tmp_path):
    """The weights that differ are named."""
    model = load_model(str(folder), torch.float32)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    write_model(merged_tensors(model), model.config, tmp_path / "written", model.generation_config)
    with pytest.raises(ModelError, match=r"does not hold the same weights.*model.norm.weight"):
        check_written(tmp_path / "written", str(folder), torch.float32)


def test_a_config_that_computes_otherwise_is_refused(folder, tmp_path):
    """The same weights under another rotary base give other logits."""
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    stated = json.loads((copied / "config.json").read_text())
    stated["rope_parameters"] = {"rope_theta": 3.0, "rope_type": "default"}
    (copied / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError, match="computes other logits when it is loaded again"):
        check_written(copied, str(folder), torch.float32)


@pytest.mark.parametrize(("epsilon", "said"), [(-1e9, "computes NaN in float32"), (float("-inf"), "computes")])
def test_a_model_that_computes_no_numbers_is_refused(folder, tmp_path, epsilon, said):
    """Finite weights under a config that makes NaN of them: the model is to blame, not its checkpoint."""
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    stated = json.loads((copied / "config.json").read_text()) | {"rms_norm_eps": epsilon}
    (copied / "config.json").write_text(json.dumps(stated))
    with pytest.raises(
        ModelError, match=said + r".*weights are finite; give the config\.json that belongs to these weights$"
    ):
        check_written(copied, str(copied), torch.float32)


def test_a_tokenizer_that_becomes_another_one_is_refused(folder, tmp_path):
    """The tokenizer of one folder, asked to be that of another run's, is compared by ids and control tokens."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.backend.chat_template = "{{ messages[0]['content'] }}"
    assert try_checkpoint(str(folder), tokenizer).said == ()
    lying = type(tokenizer)(**{**vars(tokenizer), "stop_ids": (1,)})
    with pytest.raises(ModelError, match="other stop tokens when it is written and loaded again"):
        try_checkpoint(str(folder), lying)


def test_targets_that_cannot_be_are_refused_before_weights_are_read():
    """`gnomon plan` names what fits as `gnomon train` does."""
    with pytest.raises(ConfigError, match=r"lora.targets: unknown module 'q_prj'; did you mean 'q_proj'"):
        try_checkpoint("tiny", load_tokenizer("tiny"), lora=LoraConfig(rank=4, targets=("q_prj",)))


def test_what_adapters_leave_out_is_said(tmp_path):
    """A router that computes in its own way is named once, however many layers have one."""
    config = hf.AutoConfig.for_model(
        "phimoe", vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2,
        bos_token_id=256, eos_token_id=257, pad_token_id=258,
    )  # fmt: skip
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load_tokenizer("tiny").save(tmp_path)

    said = try_checkpoint(str(tmp_path), load_tokenizer(str(tmp_path)), lora=LoraConfig(rank=4)).said

    assert [note for note in said if "lora" in note] == [
        "lora.targets leaves out router, which computes in a way of its own"
    ]
