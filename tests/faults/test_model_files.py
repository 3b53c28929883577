"""Whatever stands in the files of a model's folder: one clear error, or a model. Never anything else."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.test_files import NASTY, odd_somewhere, spliced

from gnomon.core.errors import ModelError
from gnomon.models.critic import HEAD_FILE, ValueHead, check_critic, load_critic, write_critic
from gnomon.models.load import check_model, load_model, load_tokenizer
from gnomon.models.tiny import save_tiny

QUICK, THOROUGH = 20, 1000
WRITTEN = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
# Which tiny has not, and other models have.
OTHERS = ("model.safetensors.index.json", "special_tokens_map.json", "added_tokens.json")
QUICKLY = ("config.json", "tokenizer.json", "model.safetensors", OTHERS[0])
SLOWLY = sorted({*WRITTEN, *OTHERS, HEAD_FILE} - {*QUICKLY})
CONFIGS = [
    b'{"model_type": []}', b'{"model_type": "llama"}', b'{"model_type": "llama", "hidden_size": "x"}',
    b'{"model_type": "llama", "num_attention_heads": 0}', b'{"model_type": "llama", "torch_dtype": "x"}',
    b'{"model_type": "llama", "architectures": [1], "auto_map": 3}', b'{"model_type": "llama", "rope_scaling": 3}',
    b'{"eos_token_id": "x"}', b'{"eos_token_id": {"a": 1}}', b'{"weight_map": {"a": 3}}', b'{"weight_map": []}',
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder with a value head."""
    folder = save_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=1)
    write_critic(ValueHead(64), folder)
    return folder


def with_file(sound: Path, folder: Path, name: str, content: bytes) -> Path:
    """Return a copy of a model's folder in which one file has this content; all others are links."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in sound.iterdir():
        (folder / path.name).hardlink_to(path)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content)
    return folder


def tried(folder: Path, is_loaded: bool = True) -> str:
    """Read a model's folder in every way there is; return what was refused, "" when nothing was."""
    said = ""
    try:
        check_model(str(folder))
        load_tokenizer(str(folder))
        check_critic("tiny", str(folder))
        if is_loaded:
            load_model(str(folder), torch.float32)
            load_critic("tiny", str(folder))
    except ModelError as error:
        said = str(error) or "nothing"
    assert len(said) < 20_000
    return said


def test_a_sound_folder_is_read(sound: Path):
    """As a model, a tokenizer and a critic, so that refusing it would be noticed."""
    assert sorted(path.name for path in sound.iterdir()) == sorted((*WRITTEN, HEAD_FILE))
    assert tried(sound) == ""


@pytest.mark.parametrize("name", [*QUICKLY, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY)])
def test_nasty_contents_are_one_error(tmp_path: Path, sound: Path, name: str):
    """Nothing, no text, nesting without end, numbers beyond every type, values of another kind."""
    for content in (*NASTY, *CONFIGS):
        # A config without sizes is that of a model of seven billion parameters, which would be built.
        tried(with_file(sound, tmp_path / "model", name, content), is_loaded=name != "config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_file_is_refused_and_not_passed_over(tmp_path: Path, sound: Path, name: str):
    """One that is there and cannot be read is not taken for one that is missing: end tokens would be forgotten."""
    whole = (sound / name).read_bytes()

    assert tried(with_file(sound, tmp_path / "model", name, whole[: len(whole) // 2]))


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"weight_map": 3}'])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, sound: Path, content: bytes):
    """The list of a model's shards, by its name."""
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json' cannot be read, copy it again"):
        check_model(str(with_file(sound, tmp_path / "model", OTHERS[0], content)))


@pytest.mark.parametrize(
    "change", [{"special_tokens": {}}, {"single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}]}]
)
def test_a_panic_of_the_tokenizer_is_an_error(tmp_path: Path, sound: Path, change: dict[str, object]):
    """A token that the tokenizer's template names and its table lacks ends a library in Rust, by no Exception."""
    whole = json.loads((sound / "tokenizer.json").read_text())
    whole["post_processor"] |= change
    folder = with_file(sound, tmp_path / "model", "tokenizer.json", json.dumps(whole).encode())

    with pytest.raises(ModelError, match=r"copy its tokenizer files beside it\): PanicException"):
        load_tokenizer(str(folder))


def _mutate(folder: Path, sound: Path, data: st.DataObject) -> None:
    """Change one value of a file of JSON, or some bytes of any file."""
    name = data.draw(st.sampled_from([*WRITTEN, HEAD_FILE]))
    content = (sound / name).read_bytes()
    is_value = name.endswith(".json") and data.draw(st.booleans())
    content = odd_somewhere(json.loads(content), data) if is_value else spliced(content, data, end=4000)
    # A value may be the size of a model, which is built before it is compared with the weights that are there.
    tried(with_file(sound, folder, name, content), is_loaded=name != "config.json")


@given(data=st.data())
@settings(max_examples=QUICK)
def test_any_change_is_an_error_or_a_model(tmp_path_factory: pytest.TempPathFactory, sound: Path, data: st.DataObject):
    """One value or a few bytes of one file are another."""
    _mutate(tmp_path_factory.mktemp("fuzz") / "model", sound, data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=THOROUGH)
def test_any_change_is_an_error_or_a_model_very_often(
    tmp_path_factory: pytest.TempPathFactory, sound: Path, data: st.DataObject
):
    """The same, 1,000 times."""
    _mutate(tmp_path_factory.mktemp("fuzz") / "model", sound, data)
