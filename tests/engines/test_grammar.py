"""Answers that obey a JSON schema or a regular expression: how they are drawn, and what is refused."""

import asyncio
import json
import math
import re
from dataclasses import replace

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.config.experiment import from_table, to_toml
from gnomon.core.errors import ConfigError
from gnomon.core.sections import EvalSampling, GrammarConfig, SamplingConfig
from gnomon.core.tables import parse_toml
from gnomon.core.types import Completion
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.grammar import Grammar, allowed_tokens, draw_under
from gnomon.engines.local import LocalEngine
from gnomon.engines.own import fault_of_grammar
from gnomon.engines.pool import CompletionValidator
from gnomon.engines.rng import uniforms
from gnomon.engines.sampler import draw, draw_allowed
from gnomon.engines.vllm.protocol import sampling_from, sampling_to
from gnomon.engines.vllm.sampling import SamplingRow, choose, native_fault
from gnomon.models.tiny import tiny_model
from gnomon.testing import TRIAL_CONFIG, trial_model, trial_snapshot

PROMPT = [256, 50, 43, 50, 61]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


def obeying(regex: str | None = None, **others: object) -> Sampling:
    """Return a sampling of the trial model's tokens under a grammar."""
    plain = Sampling(max_completion_length=40, stop_ids=(257,), tokenizer=trial_model())
    return replace(plain, **{"grammar": GrammarConfig(regex=regex), **others})


def answers(keys: range, *samplings: Sampling) -> list[list[Completion]]:
    """Return what an engine with room for three rows says under each sampling, asked together."""

    async def body() -> list[list[Completion]]:
        engine = LocalEngine(tiny_model(0, TRIAL_CONFIG), max_concurrent=3)
        await engine.load(trial_snapshot(0))
        try:
            return await asyncio.gather(*(engine.generate(PROMPT, keys, sampling) for sampling in samplings))
        finally:
            await engine.close()

    torch.set_num_threads(1)
    return asyncio.run(body())


def text(done: Completion) -> str:
    """Return what an answer says before its stop token."""
    return bytes(token for token in done.tokens if token < 256).decode()


def test_every_answer_is_json_of_the_schema():
    """Answers of more rows than fit at once end by themselves and pass another library's check of the schema."""
    [found] = answers(range(12), obeying(grammar=GrammarConfig(schema=SCHEMA), max_completion_length=90))

    assert {done.stop for done in found} == {"stop"}
    for done in found:
        jsonschema.validate(json.loads(text(done)), SCHEMA)
    assert len({text(done) for done in found}) > 6


@pytest.mark.parametrize(
    ("grammar", "least"),
    [
        (GrammarConfig(regex="[0-9]{3}"), 4), (GrammarConfig(regex="[a-z ]*;"), 2),
        (GrammarConfig(regex="(yes|no), [0-9]{1,3}"), 6), (GrammarConfig(schema=SCHEMA), 26),
        (GrammarConfig(schema={"type": "object"}), 3), (GrammarConfig(schema={"type": "array"}), 3),
    ],
)  # fmt: skip
def test_a_budget_below_the_shortest_answer_is_said(grammar: GrammarConfig, least: int):
    """The budget that the shortest answer fits, stop token included, is not mentioned; one token less is."""
    tried = Grammar.of(obeying(grammar=grammar))
    assert tried is not None

    assert tried.cut(least) == ""
    assert f"may have {least - 1} tokens" in tried.cut(least - 1)
    assert tried.cut(least - 1).endswith(f"the shortest one found has {least}")


def test_rows_with_other_grammars_and_none_do_not_touch_each_other():
    """Together they are what they are alone; without a grammar to the bit what they were."""
    asked = [obeying("(ab|cd)+"), Sampling(max_completion_length=40, stop_ids=(257,)), obeying("[0-9]{1,3}", top_p=0.8)]
    together = answers(range(5), *asked)
    alone = [answers(range(5), one)[0] for one in asked]

    assert [[done.tokens for done in found] for found in together] == [[d.tokens for d in found] for found in alone]
    assert all(re.fullmatch("(ab|cd)*[ac]?", text(done)) for done in together[0])
    assert all(re.fullmatch("[0-9]{1,3}", text(done)) for done in together[2])


def test_golden_logprobs():
    """Of logits 0, ln 2, ln 5 and ln 8 the second and third are allowed: 2/7 and 5/7 of them, 2/16 and 5/16 of all."""
    logits = torch.tensor([[1.0, 2.0, 5.0, 8.0]] * 2).log()
    allowed = torch.tensor([[False, True, True, False]] * 2)
    drawn = draw_allowed(logits, torch.tensor([0.28, 0.29], dtype=torch.float64), Sampling(), allowed)

    assert drawn.tokens.tolist() == [1, 2]
    assert drawn.logprobs.tolist() == pytest.approx([math.log(2 / 7), math.log(5 / 7)])
    assert drawn.full_logprobs.tolist() == pytest.approx([math.log(2 / 16), math.log(5 / 16)])


@given(st.data(), st.floats(0, 1, exclude_max=True), st.sampled_from([(1.0, 1.0, 0), (0.7, 0.8, 0), (2.0, 1.0, 3)]))
def test_a_draw_under_a_grammar_is_a_draw_of_what_it_leaves(data, u, how):
    """Token and log-probability are those of logits without the others; the full one is that of all logits.

    Also where all that is allowed is 200 nats below the rest, where its share of the whole is 0 in float32.
    """
    temperature, top_p, top_k = how
    logits = torch.tensor([data.draw(st.lists(st.floats(-9, 9, width=32), min_size=6, max_size=6))])
    allowed = torch.tensor([data.draw(st.lists(st.booleans(), min_size=6, max_size=6).filter(any))])
    logits = torch.where(allowed, logits - data.draw(st.sampled_from([0.0, 200.0])), logits)
    sampling, uniform = Sampling(temperature, top_p, top_k), torch.tensor([u], dtype=torch.float64)
    drawn, left = draw_allowed(logits, uniform, sampling, allowed), logits.masked_fill(~allowed, -math.inf)
    alone, whole = draw(left, uniform, sampling), (logits / temperature).log_softmax(-1)

    assert drawn.tokens.tolist() == alone.tokens.tolist()
    assert drawn.logprobs.item() == pytest.approx(alone.logprobs.item(), abs=1e-5)
    assert drawn.full_logprobs.item() == pytest.approx(whole[0, drawn.tokens].item(), abs=1e-4)


def test_greedy_takes_the_likeliest_of_what_is_allowed():
    """With the log-probability of the policy itself at temperature 1."""
    logits, allowed = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[False, True, True]])
    drawn = draw_allowed(logits, torch.zeros(1, dtype=torch.float64), Sampling(temperature=0), allowed)

    assert drawn.tokens.tolist() == [1]
    assert drawn.logprobs.item() == pytest.approx(float(logits.log_softmax(-1)[0, 1]))


def test_each_answer_of_a_conversation_obeys_for_itself():
    """A turn behind a former answer, whose keys and values are kept, begins the grammar anew."""

    async def body() -> list[str]:
        engine, said, before = LocalEngine(tiny_model(0, TRIAL_CONFIG), kept_bytes=1 << 20), [], list(PROMPT)
        await engine.load(trial_snapshot(0))
        for turn in range(3):
            [done] = await engine.generate(before, [turn], obeying("[0-9]{2,4};"))
            said.append(text(done))
            before += [*done.tokens, 43, 50]
        await engine.close()
        return said

    assert all(re.fullmatch("[0-9]{2,4};", answer) for answer in asyncio.run(body()))


def test_a_stop_string_and_the_budget_end_answers_that_a_grammar_would_go_on_with():
    """As without one: at the token that completes the string, or at the budget."""
    asked = obeying("[ab]{8}!", stop="a"), obeying("[ab]{8}!", max_completion_length=5)
    by_string, by_budget = answers(range(4), *asked)

    assert all(re.fullmatch("b*a|b{8}!", text(done)) and done.stop == "stop" for done in by_string)
    assert all(re.fullmatch("[ab]{5}", text(done)) and done.stop == "length" for done in by_budget)


def test_a_stop_token_is_allowed_where_the_grammar_is_satisfied_alone():
    """A text's token that ends answers is no part of one: a line end within a schema's white space."""
    [found] = answers(range(8), obeying("[ab]{2,4}", stop_ids=(257, 98)))

    assert all(re.fullmatch("a{2,4}b?", text(done)) and done.stop == "stop" for done in found)
    with pytest.raises(ConfigError, match=r"with this model's tokens sampling\.grammar ends in nothing after 1 tokens"):
        Grammar.of(obeying("ab", stop_ids=(257, 98)))


def test_a_character_is_never_cut_by_the_end_of_an_answer():
    """A character of four byte tokens is whole where an answer ends by itself."""
    [found] = answers(range(8), obeying("[\N{GRINNING FACE}\N{PILE OF POO}é]{1,5}"))

    assert all(done.stop == "stop" and len(text(done)) <= 5 for done in found)


def test_vllms_rows_draw_the_same_and_may_go_back():
    """`choose` draws as the local engine does from equal logits, also when a position is computed again."""
    sampling, generator = obeying("[0-9]{3}", temperature=0.9), torch.Generator().manual_seed(1)
    numbers, logits = uniforms(7, 8), torch.randn(8, 259, generator=generator)
    grammar = Grammar.of(sampling)
    assert grammar is not None
    state, row, said = grammar.begin(), SamplingRow(sampling, numbers), list[int]()
    for place in (0, 1, 2, 1, 2, 3):
        given = logits[place : place + 1].clone()
        del said[place:]
        choose(given, {0: (row, said)})
        u = torch.from_numpy(numbers[place : place + 1])
        expected = draw_under([state], [said], logits[place : place + 1], u, sampling)
        assert given.argmax().item() == expected.tokens.item()
        assert row.logprobs[place] == pytest.approx(expected.logprobs.item(), abs=1e-6)
        said.append(int(expected.tokens.item()))
    assert said[3] == 257


def test_vllms_own_sampler_is_refused_a_grammar():
    """It says no log-probability without one; the message says what to set."""
    fault = native_fault(obeying("a"))

    assert fault is not None
    assert "sampling.grammar" in fault
    assert "set engine.draws = 'keyed'" in fault


def test_an_engine_that_ignores_a_grammar_is_found():
    """Before training, and at each answer."""
    sampling = obeying("[0-9]+")

    class Ignoring(LocalEngine):
        async def generate(self, prompt, keys, sampling):
            return await super().generate(prompt, keys, replace(sampling, grammar=GrammarConfig()))

    async def body(engine: Engine) -> str | None:
        await engine.load(trial_snapshot(0))
        try:
            return await fault_of_grammar(engine, PROMPT, sampling)
        finally:
            await engine.close()

    said = asyncio.run(body(Ignoring(tiny_model(0, TRIAL_CONFIG))))
    assert said is not None
    assert "which sampling.grammar does not allow there" in said
    assert asyncio.run(body(LocalEngine(tiny_model(0, TRIAL_CONFIG)))) is None
    short = Completion((49, 257), (-0.1,) * 2, (-0.1,) * 2, 0, 0, "stop")
    assert CompletionValidator(1, sampling, 259, {0}).fault([short]) is None


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"regex": "["}, r"regex = '\[' cannot be used: unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": r"[^\s\S]"}, "no answer satisfies it but an empty one"),
        ({"regex": ""}, "may have from 1 to"),
        ({"regex": "a", "schema": {"type": "integer"}}, "an answer obeys one of them; remove one"),
        ({"schema": {"type": "foo"}}, "cannot be used: Invalid type: foo"),
        ({"schema": {"type": "integer", "minimum": 3, "maximum": 2}}, r"minimum \(3\) is greater than maximum \(2\)"),
        ({"schema": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ."uniqueItems"'),
        ({"schema": {"$ref": "http://127.0.0.1:9/schema"}}, "does not fetch"),
        ({"schema": "{"}, "sampling.grammar.schema is no JSON"),
        ({"schema": "nowhere.json"}, "schema = 'nowhere.json' cannot be read"),
        ({"schema": "a\0b"}, "cannot be read"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(grammar, words):
    """In one message of at most five lines, by what is wrong with it."""
    with pytest.raises(ConfigError, match=words) as told:
        Grammar.of(obeying(grammar=GrammarConfig(**grammar)))
    assert str(told.value).count("\n") < 5


def test_what_a_grammar_needs_is_named(monkeypatch):
    """The model's tokens, a token that ends an answer, and the extra."""
    with pytest.raises(ConfigError, match=r"set Sampling\(tokenizer=FOLDER\)"):
        Grammar.of(obeying("a", tokenizer=""))
    with pytest.raises(ConfigError, match=r"no token that ends an answer.*name one in sampling\.stop_ids"):
        Grammar.of(obeying("a", stop_ids=()))
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"sampling\.grammar needs llguidance.*pip install 'gnomon\[grammar\]'"):
        Grammar.of(obeying("never compiled before"))


def test_a_dead_end_in_the_middle_of_an_answer_fails_its_own_request():
    """Where llguidance gives up, or no token may follow; vLLM's row says so by a log-probability that is none."""
    grammar = Grammar.of(obeying("abc"))
    assert grammar is not None
    state = grammar.begin()
    assert allowed_tokens([state], [[97, 99]], 259).all()
    assert "sampling.grammar ends in nothing after 2 tokens of an answer" in state.fault
    row = SamplingRow(obeying("abc"), uniforms(7, 8))
    choose(torch.zeros(1, 259), {0: (row, [97, 99])})
    assert math.isnan(row.logprobs[2])
    assert row.full_logprobs[2] == pytest.approx(-math.log(259))


def test_a_schema_is_recorded_as_its_text(tmp_path):
    """A table, a text and a file are one record, which does not follow the file."""
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(SCHEMA))
    given = [SCHEMA, json.dumps(SCHEMA), str(file)]
    made = [
        from_table(
            {"model": "tiny", "task": "arithmetic", "algorithm": "grpo", "sampling": {"grammar": {"schema": one}}}
        )
        for one in given
    ]
    file.unlink()
    records = {to_toml(one.experiment) for one in made}

    assert len(records) == 1
    again = from_table(parse_toml(records.pop())).experiment
    assert again == made[0].experiment
    assert json.loads(str(again.sampling.grammar.schema)) == SCHEMA
    assert sampling_from(json.loads(json.dumps(sampling_to(obeying("a"))))) == obeying("a")


def test_a_held_out_set_has_a_grammar_of_its_own():
    """What is not set is training's; {} is none."""
    training = SamplingConfig(grammar=GrammarConfig(regex="a+"))

    assert "text of the expression 'a+' (training's)" in EvalSampling().words(training)
    assert "text of" not in EvalSampling(grammar=GrammarConfig()).words(training)
    own = EvalSampling(grammar=GrammarConfig(regex="b"))
    assert replace(training, **own.over(EvalSampling()).given).grammar.regex == "b"
