"""Stop strings: over the borders of tokens, in any alphabet, in every row, and in the text that rewards see."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.conftest import Asks
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig, PreTrainedTokenizerFast

from gnomon.core.errors import ConfigError
from gnomon.core.sections import EvalSampling, SamplingConfig
from gnomon.core.types import Completion, Grade, Task
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.engines.scripted import ScriptedEngine
from gnomon.engines.stop_strings import StopStrings, check_stop_strings, cut_at_stop
from gnomon.models.tiny import tiny_model, tiny_tokenizer
from gnomon.models.tokenizer import TokenBytes, Tokenizer, wrap
from gnomon.rollouts.rollout import Rollouter, RolloutTimer
from gnomon.testing import TRIAL_CONFIG, trial_model

CORPUS = [
    "the answer is </answer> 42\n\nQuestion: what is 6 * 7?",
    "été à Zürich, 日本語のテキスト \N{GRINNING FACE} naïve",
]


def byte_level() -> Tokenizer:
    """A byte-level BPE vocabulary, as GPT-2, Llama 3 and Qwen have: characters beyond ASCII are cut into tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=340, initial_alphabet=letters))
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return _wrapped(backend)


def byte_fallback() -> Tokenizer:
    """A vocabulary of pieces with a blank in front and ``<0x..>`` for other bytes, as Llama 2 and Gemma have."""
    pieces = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁answer", "</", "answer"]
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz</>QWZ:0123456789é日"} - set(pieces))
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *letters])}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return _wrapped(backend)


def _wrapped(backend: Backend) -> Tokenizer:
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", unk_token=None)
    return wrap(fast, LlamaConfig(vocab_size=backend.get_vocab_size(), max_position_embeddings=99))


TOKENIZERS = {"bytes": tiny_tokenizer(), "byte-level": byte_level(), "byte-fallback": byte_fallback()}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
PARTS = ["a", "</", "é", "日", "\N{GRINNING FACE}", "answer", " ", "\n", ">", "Q"]
texts = st.lists(st.sampled_from(PARTS), max_size=9).map("".join)


@every_tokenizer
@given(st.data())
def test_an_answer_ends_at_the_first_token_with_which_its_text_holds_a_string(name: str, data: st.DataObject):
    """Of any ids, half characters among them: not a token sooner, not one later, whatever the window looks at."""
    tokenizer = TOKENIZERS[name]
    known = TokenBytes(tokenizer)
    own = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4)
    ids = [i for text in data.draw(st.lists(texts, max_size=6)) for i in tokenizer.encode_plain(text)]
    place = data.draw(st.integers(0, len(ids)))
    ids = [*ids[:place], *data.draw(own), *ids[place:]]
    whole = b"".join(known[i] for i in ids)
    parts = whole.decode(errors="ignore")
    start = data.draw(st.integers(0, max(0, len(parts) - 1)))
    wanted = parts[start : start + data.draw(st.integers(1, 9))]
    strings = [string for string in (wanted, data.draw(texts), "never") if string]
    stops = StopStrings(tuple(string.encode() for string in strings), known)

    held = [any(s.encode() in b"".join(known[i] for i in ids[: n + 1]) for s in strings) for n in range(len(ids))]
    first = held.index(True) if True in held else None

    assert stops.first(ids) == first
    assert [n for n in range(len(ids)) if stops.are_completed_by(ids[: n + 1])][:1] == (
        [] if first is None else [first]
    )


@every_tokenizer
@given(st.data())
def test_the_bytes_of_tokens_are_the_text(name: str, data: st.DataObject):
    """Joined and read as UTF-8 they are what the tokenizer decodes, of any ids, behind a letter."""
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer.encode_plain("a")[-1], *data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8))]
    whole = b"".join(TokenBytes(tokenizer)[i] for i in ids)

    if "\N{REPLACEMENT CHARACTER}" not in tokenizer.spelled(ids):  # of which a decoder may write more or fewer
        assert whole.decode() == tokenizer.spelled(ids)


@pytest.mark.parametrize("string", ["</answer>", "\n\nQuestion:", " 42", "été", "日本", "\N{GRINNING FACE}"])
def test_a_string_is_found_however_it_is_cut(string: str):
    """In one token, over several, and with the end of one token and the beginning of another beside it."""
    tokenizer = byte_level()
    known = TokenBytes(tokenizer)
    stops = StopStrings((string.encode(),), known)
    cuts = [tokenizer.encode_plain(f"is{string}!"), [i for c in f"is{string}!" for i in tokenizer.encode_plain(c)]]

    for ids in cuts:
        place = stops.first(ids)
        assert place is not None
        before, through = (b"".join(known[i] for i in ids[:end]) for end in (place, place + 1))
        assert string.encode() in through
        assert string.encode() not in before
    assert len(cuts[0]) < len(cuts[1]), "the two are cut otherwise"


def done(text: str, tokenizer: Tokenizer, stop: str = "stop") -> Completion:
    """An answer of this text."""
    ids = tuple(tokenizer.encode_plain(text))
    return Completion(ids, (-0.5,) * len(ids), (-0.5,) * len(ids), 0, 0, stop)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "stop", "without", "with_it"),
    [
        ("4</answer> so", ("</answer>",), "4", "4</answer>"),
        ("4 b a", ("a", "b"), "4 ", "4 b"),
        ("4 abc", ("bc", "abc"), "4 ", "4 abc"),
        ("4 abcd", ("abcd", "bc"), "4 a", "4 abc"),
        ("été 日本語", "日本", "été ", "été 日本"),
        ("nothing", "x", "nothing", "nothing"),
    ],
)
def test_rewards_see_the_text_up_to_the_string_that_ends_first(
    text: str, stop: str | tuple[str, ...], without: str, with_it: str
):
    """Of several that end at one place, the one that begins first; what stands behind it in its token is dropped."""
    sampling = SamplingConfig(stop=stop)

    assert cut_at_stop(text, done(text, tiny_tokenizer()), sampling) == without
    assert cut_at_stop(text, done(text, tiny_tokenizer()), replace(sampling, include_stop=True)) == with_it


def test_a_blank_that_the_tokenizer_leaves_out_is_no_reason_to_see_the_string():
    """The first token is " answer", the text "answer": an answer that the engine ended there is empty."""
    tokenizer, sampling = byte_fallback(), SamplingConfig(stop=" answer")
    ended = done("answer", tokenizer)
    known = TokenBytes(tokenizer)

    assert StopStrings((b" answer",), known).first(ended.tokens) == len(ended.tokens) - 1
    assert cut_at_stop(tokenizer.decode(ended.tokens), ended, sampling) == ""
    assert cut_at_stop("answer", replace(ended, stop="length"), sampling) == "answer"


def engines() -> dict[str, Engine]:
    """Engines of one model."""
    from examples.own_engine import Generate

    model = tiny_model(1, TRIAL_CONFIG)
    return {
        "local": LocalEngine(model),
        "one row": LocalEngine(tiny_model(1, TRIAL_CONFIG), max_concurrent=1, shared=False),
        "pool": EnginePool({"a": LocalEngine(tiny_model(1, TRIAL_CONFIG), shared=False)}, vocabulary_size=259),
        "transformers": Generate(trial_model(), torch.float32, torch.device("cpu"), max_concurrent=3),
    }


def test_greedy_answers_end_alike_in_every_engine(ask):
    """Rows of several prompts, some with a shared beginning, each ended by its own settings, at temperature 0 too."""
    prompts = [[256, 50, 43, 50, 61], [256, 50, 43, 51, 61], [256, 72, 105]]
    drawn = Sampling(max_completion_length=24, stop_ids=(257,), tokenizer=trial_model())
    greedy = replace(drawn, temperature=0)
    [*free] = ask(
        LocalEngine(tiny_model(1, TRIAL_CONFIG)), [(p, range(3), s) for p in prompts for s in (drawn, greedy)]
    )
    letters = [chr(i) for c in free for i in c[0].tokens[5:] if i < 128]
    stops = (tuple(letters[:2]), letters[-1])
    asks: Asks = [(p, range(3), replace(s, stop=stop)) for p in prompts for s in (drawn, greedy) for stop in stops]

    found = {name: ask(engine, asks) for name, engine in engines().items()}

    assert "stop" in {c.stop for each in found["local"] for c in each}
    for name, answers in found.items():
        assert [[(c.tokens, c.stop) for c in each] for each in answers] == [
            [(c.tokens, c.stop) for c in each] for each in found["local"]
        ], name


def test_rows_without_stop_strings_are_not_ended_by_those_of_others(ask):
    """One batch, one prompt, two settings: the row without ends by its budget, and is as if alone."""
    prompt, plain = [256, 50, 43, 50, 61], Sampling(max_completion_length=12)
    [[alone]] = ask(LocalEngine(tiny_model(0)), [(prompt, [5], plain)])
    stop = next(chr(i) for i in alone.tokens if i < 128)

    [[ended], [free]] = ask(
        LocalEngine(tiny_model(0)), [(prompt, [5], replace(plain, stop=stop, tokenizer="tiny")), (prompt, [5], plain)]
    )

    assert free == alone
    assert ended.tokens == alone.tokens[: alone.tokens.index(ord(stop)) + 1]
    assert ended.logprobs == alone.logprobs[: len(ended.tokens)]
    assert ended.stop == "stop"


def test_an_engine_that_goes_on_behind_a_stop_string_is_taken_out():
    """An engine of one's own that does not know them is no reason to train on what nobody asked for."""

    class Deaf(ScriptedEngine):
        async def generate(self, prompt, keys, sampling):
            return await super().generate(prompt, keys, replace(sampling, stop=()))

    pool = EnginePool({"own": Deaf(lambda prompt, key: "4. And")}, warn=lambda text: None)
    asked = pool.generate([50], [0], Sampling(stop=".", tokenizer="tiny"))
    with pytest.raises(Exception, match=r"6 tokens, though the first 2 complete a stop string \(sampling.stop\)"):
        asyncio.run(asked)


class Lengths:
    """Grades with the number of characters that are seen."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def grade(self, sample) -> Grade:
        """Return the length."""
        self.seen.append(sample.completion)
        return Grade(float(len(sample.completion)))


@pytest.mark.parametrize(("include", "text"), [(False, "4"), (True, "4</a>")])
def test_the_record_holds_what_the_reward_saw_and_every_token_is_trained(include: bool, text: str):
    """The text ends before the string, or with it; tokens, mask and log-probabilities have all of it."""
    sampling = Sampling(stop="</a>", include_stop=include, tokenizer="tiny")
    engine, grader = ScriptedEngine(lambda prompt, key: "4</a> and more"), Lengths()
    rollouter = Rollouter(engine, grader, tiny_tokenizer().decode, sampling, generations=2, seed=0)

    group = asyncio.run(rollouter.run_group(Task("t", (50,), "2"), 0, RolloutTimer()))

    assert grader.seen == [text] * 2
    for rollout in group.rollouts:
        assert rollout.text == text
        assert bytes(rollout.response) == b"4</a>"
        assert rollout.mask == (True,) * 5
        assert rollout.logprobs == (-0.1,) * 5
        assert rollout.stop == "stop"


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("", r"sampling.stop has a text of 0 characters, ''; it may have from 1 to 256"),
        (("a", ""), "a text of 0 characters"),
        ("x" * 257, "a text of 257 characters"),
        (tuple(map(str, range(65))), "65 texts, and each is looked for at each token: 64 at most"),
        (("a", 7), "has 7, which is no text; token ids are sampling.stop_ids"),
        ("a\N{REPLACEMENT CHARACTER}", "stands for bytes that are no text"),
    ],
)
def test_what_is_no_stop_string_is_refused(stop, said: str):
    """Empty, endless, too many, or no text; for held-out answers as well."""
    with pytest.raises(ConfigError, match=said):
        SamplingConfig(stop=stop)
    if stop:
        with pytest.raises(ConfigError, match=f"evaluation.{said}" if said.startswith("sampling") else "evaluation"):
            EvalSampling(stop=stop)


def test_a_string_that_no_token_spells_is_refused():
    """Capitals of a vocabulary that writes all text small would never end an answer."""
    backend = byte_level().backend.backend_tokenizer
    from tokenizers import normalizers

    backend.normalizer = normalizers.Lowercase()

    with pytest.raises(ConfigError, match=r"has 'Question:', which the model's tokenizer spells 'question:'"):
        check_stop_strings(SamplingConfig(stop="Question:"), _wrapped(backend))
    check_stop_strings(SamplingConfig(stop="question:"), _wrapped(backend))


def test_strings_without_a_tokenizer_are_refused(tmp_path: Path):
    """Which bytes a token stands for, an engine cannot guess."""
    engine = LocalEngine(tiny_model(0))
    with pytest.raises(ConfigError, match=r"sampling.stop = \['a'\] needs the model whose tokens spell it"):
        asyncio.run(engine.generate([1], [0], Sampling(stop="a")))
    asyncio.run(engine.close())


def test_the_window_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """Looking at the last of 5,000 tokens reads as many tokens as the longest string has bytes, and no more."""
    read: list[int] = []

    class Counting(TokenBytes):
        def __getitem__(self, token: int) -> bytes:
            read.append(token)
            return super().__getitem__(token)

    stops = StopStrings((b"0123456789",), Counting(tiny_tokenizer()))
    tokens: Sequence[int] = [65] * 5000

    assert not stops.are_completed_by(tokens)
    assert len(read) == 10
