import pytest
import torch

from gnomon.core.errors import ModelError
from gnomon.models.hf_names import HfNames, as_folder
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import tiny_model


def test_a_dense_model_is_spelled_as_it_is():
    """Names and tensors stay; nothing is copied."""
    given = dict(merged_tensors(tiny_model(0)))
    spelled = HfNames("tiny").spell(given.items())
    assert {name: tensor.data_ptr() for name, tensor in spelled.items()} == {n: t.data_ptr() for n, t in given.items()}


def test_experts_are_spelled_one_by_one(tmp_path):
    """The names are those of the files that transformers writes, and so are the values."""
    from safetensors.torch import load_file

    folder = as_folder("tiny-moe", tmp_path)
    from gnomon.models.load import load_model

    spelled = HfNames("tiny-moe").spell(merged_tensors(load_model("tiny-moe", torch.float32)))
    written = load_file(f"{folder}/model.safetensors")
    assert spelled.keys() == written.keys()
    assert all(torch.equal(spelled[name], written[name]) for name in written)
    assert any(".experts.0." in name for name in written)


def test_weights_of_another_model_are_refused_by_name():
    """Missing, unknown and misshapen weights are named."""
    given = dict(merged_tensors(tiny_model(0)))
    spelling = HfNames("tiny")
    lost = given.pop("model.norm.weight")
    with pytest.raises(ModelError, match=r"missing \['model.norm.weight'\], unknown \['other'\]"):
        spelling.spell([*given.items(), ("other", lost)])
    with pytest.raises(ModelError, match=r"shapes model.norm.weight \(1,\) for \(64,\)"):
        spelling.spell([*given.items(), ("model.norm.weight", torch.ones(1))])


def test_a_folder_is_given_as_it_is(tmp_path):
    """Folders stay where they are, hub names stay names, and built-in models are written."""
    assert as_folder(str(tmp_path), tmp_path / "spare") == str(tmp_path)
    assert as_folder("some/name", tmp_path / "spare") == "some/name"
    assert as_folder("tiny", tmp_path / "spare") == str(tmp_path / "spare")
    assert (tmp_path / "spare" / "model.safetensors").is_file()
