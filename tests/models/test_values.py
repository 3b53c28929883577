"""A value is of the state before the token, whatever stands behind it, beside it, or in another row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.models.critic import ValueScorer, load_critic

PROMPTS = torch.tensor([3, 3, 2])
LENGTHS = torch.tensor([8, 6, 7])
WIDTH = 5
MASK = torch.arange(WIDTH) < (LENGTHS - PROMPTS)[:, None]


def build_critic():
    critic = load_critic("tiny", "policy")
    torch.nn.init.normal_(critic.score.weight, generator=torch.Generator().manual_seed(1))
    return critic


@pytest.fixture(scope="module")
def critic():
    """A value model that has an opinion."""
    return build_critic()


@pytest.fixture(scope="module")
def scorer(critic):
    """Reads it; the first two rows below share their prompt, and it computes that once."""
    return ValueScorer(critic, critic.score)


def rows(seed: int = 0) -> torch.Tensor:
    tokens = torch.randint(0, 256, (3, 8), generator=torch.Generator().manual_seed(seed))
    tokens[1, :3] = tokens[0, :3]
    return tokens


def test_a_value_is_what_a_reward_model_says_of_everything_before_the_token(critic, scorer):
    """transformers reads the last position of what it is given: here the prefix before each token, and all of it."""
    tokens, mask = rows(), MASK.clone()
    mask[2, 1] = False

    found = scorer(tokens, PROMPTS, LENGTHS, mask)

    def said(row: int, length: int) -> float:
        return float(critic(input_ids=tokens[row : row + 1, :length]).logits.detach())

    for row in range(3):
        wanted = [said(row, int(PROMPTS[row]) + t) if mask[row, t] else 0.0 for t in range(WIDTH)]
        assert found.values[row].tolist() == pytest.approx(wanted, abs=1e-5)
        assert float(found.bootstrap[row].detach()) == pytest.approx(said(row, int(LENGTHS[row])), abs=1e-5)
    # The shared prompt once, its two answers, and the third row behind them: nothing is padded.
    assert scorer.shares_prompts
    assert found.computed == (3 + 5 + 3) + 7


@given(t=st.integers(0, WIDTH - 1), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_what_comes_at_a_token_and_after_it_does_not_change_its_value(scorer, t, seed):
    """Other tokens at and after column t: values up to and with column t are the same, later ones and the end not."""
    tokens = rows(seed)
    other = tokens.clone()
    for row, start in enumerate((PROMPTS + t).tolist()):
        other[row, start:] = (other[row, start:] + 1) % 256

    before, after = (scorer(each, PROMPTS, LENGTHS, MASK) for each in (tokens, other))

    torch.testing.assert_close(after.values[:, : t + 1], before.values[:, : t + 1], rtol=0, atol=1e-5)
    differs = (after.values - before.values).abs()[:, t + 1 :][MASK[:, t + 1 :]]
    assert (differs > 1e-5).all()
    assert bool((after.bootstrap - before.bootstrap).abs()[0] > 1e-5)


def test_rows_alone_have_the_values_that_they_have_together(scorer):
    """Neither the other rows nor the padding behind a row matter."""
    tokens = rows()
    together = scorer(tokens, PROMPTS, LENGTHS, MASK)

    for row, length in enumerate(LENGTHS.tolist()):
        one = slice(row, row + 1)
        width = length - int(PROMPTS[row])
        alone = scorer(tokens[one, :length], PROMPTS[one], LENGTHS[one], MASK[one, :width])
        torch.testing.assert_close(alone.values[0], together.values[row, :width], rtol=0, atol=1e-5)
        torch.testing.assert_close(alone.bootstrap[0], together.bootstrap[row], rtol=0, atol=1e-5)


def test_rows_without_a_trained_token_have_no_value(scorer):
    """Zeros, in a row and in a whole batch of them, which costs no pass."""
    mask = MASK.clone()
    mask[1] = False

    found = scorer(rows(), PROMPTS, LENGTHS, mask)
    nothing = scorer(rows(), PROMPTS, LENGTHS, mask & False)

    assert not found.values[1].any()
    assert (found.bootstrap != 0).tolist() == [True, False, True]
    assert not nothing.values.any()
    assert not nothing.bootstrap.any()
    assert nothing.computed == 0


def test_a_new_critic_expects_nothing():
    """A head of zeros: every value is exactly 0."""
    critic = load_critic("tiny", "policy")

    found = ValueScorer(critic, critic.score)(rows(), PROMPTS, LENGTHS, MASK)

    assert not found.values.any()
    assert not found.bootstrap.any()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_frozen_trunk_gets_no_gradient(is_frozen):
    """The head always has one, the trunk when it is not frozen."""
    critic = build_critic()

    ValueScorer(critic, critic.score)(rows(), PROMPTS, LENGTHS, MASK, is_frozen).values.sum().backward()

    assert critic.score.weight.grad.abs().sum() > 0
    trunk = [parameter.grad for parameter in critic.base_model.parameters()]
    assert all((gradient is None) == is_frozen for gradient in trunk)


def test_values_of_a_bf16_trunk_are_float32():
    """The head is float32: values are not rounded to a 256th."""
    critic = load_critic("tiny", "policy", torch.bfloat16)
    torch.nn.init.normal_(critic.score.weight)

    values = ValueScorer(critic, critic.score)(rows(), PROMPTS, LENGTHS, MASK).values

    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_a_state_before_the_first_token_needs_a_prompt(scorer):
    """Nothing stands before the first token of an empty prompt."""
    with pytest.raises(ConfigError, match="a prompt has no token"):
        scorer(rows(), PROMPTS * 0, LENGTHS - PROMPTS, MASK)
