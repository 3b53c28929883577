"""Token ids become the texts that they stand for, one by one."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gnomon.models.tiny import tiny_tokenizer
from gnomon.models.token_strings import Vocabulary, read_vocabulary

BYTES = Vocabulary(tiny_tokenizer().backend.backend_tokenizer)


@given(st.text(max_size=40))
def test_pieces_spell_the_text(text: str):
    """Each byte of the tiny model is a token; pieces are whole characters, and together they are the text."""
    tokens = tiny_tokenizer().encode_plain(text)
    pieces = BYTES.pieces(tokens)

    assert sum(count for _, count in pieces) == len(tokens)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert "".join(piece for piece, _ in pieces) == text


def test_a_torn_character_is_shown_as_one():
    """Bytes that are no character stand for themselves, one by one; a control token has its name."""
    assert BYTES.pieces([104, 0xE2, 0x82, 104, 257]) == [
        ("h", 1), ("\ufffd", 1), ("\ufffd", 1), ("h", 1), ("<|eos|>", 1),
    ]  # fmt: skip


def test_a_folder_has_its_tokens_or_none(tmp_path: Path):
    """What a checkpoint saved is read; where nothing is, or something else, there are none."""
    tiny_tokenizer().save(tmp_path / "there")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    found = read_vocabulary(tmp_path / "there")

    assert found is not None
    assert found.pieces([72, 105]) == [("H", 1), ("i", 1)]
    assert read_vocabulary(tmp_path / "damaged") is None
    assert read_vocabulary(tmp_path / "nowhere") is None
