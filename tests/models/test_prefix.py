"""Prompts computed once for all of their responses: the same numbers, for less."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MambaConfig, MambaForCausalLM

from gnomon.models.logprobs import TokenScorer
from gnomon.models.prefix import pack
from gnomon.models.tiny import tiny_model


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five rows, two prompts of three and two tokens; responses of one to four tokens, one with a hole."""
    tokens = torch.tensor(
        [
            [9, 8, 7, 1, 2, 3, 4],
            [9, 8, 7, 5, 0, 0, 0],
            [6, 5, 1, 2, 0, 0, 0],
            [9, 8, 7, 2, 3, 0, 0],
            [6, 5, 4, 4, 4, 0, 0],
        ]
    )
    prompts = torch.tensor([3, 3, 2, 3, 2])
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    return tokens, prompts, mask


def test_shared_prompts_change_no_number():
    """Log-probabilities, entropies and every gradient equal those of rows of their own to 1e-6 in float32."""
    found = []
    for shares in (True, False):
        model = tiny_model(0)
        scorer = TokenScorer(model)
        assert scorer.shares_prompts
        scorer.shares_prompts = shares
        scores = scorer(*rows(), temperature=0.7)
        (scores.logprobs.sum() + 0.1 * scores.entropy.sum()).backward()
        found.append((scores, [p.grad for p in model.parameters()]))

    (shared, shared_gradients), (plain, plain_gradients) = found
    assert torch.allclose(shared.logprobs, plain.logprobs, atol=1e-6)
    assert torch.allclose(shared.entropy, plain.entropy, atol=1e-6)
    for ours, theirs in zip(shared_gradients, plain_gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-6)
    assert shared.computed < plain.computed


def test_a_token_sees_its_prompt_and_its_own_response_only():
    """Changing one response changes no score of the others."""
    tokens, prompts, mask = rows()
    scorer = TokenScorer(tiny_model(0))
    with torch.no_grad():
        before = scorer(tokens, prompts, mask).logprobs
        tokens[0, 3:] = torch.tensor([30, 31, 32, 33])
        after = scorer(tokens, prompts, mask).logprobs

    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


def test_rows_with_prompts_of_their_own_are_not_packed():
    """Without two rows of one prompt there is nothing to share, and the faster causal attention is used."""
    tokens, prompts, _ = rows()

    assert pack(tokens[1:3], prompts[1:3], torch.tensor([4, 4])) is None


@pytest.mark.parametrize("architecture", ["sliding window", "state space"])
def test_models_that_cannot_be_packed_say_so(architecture: str):
    """A window or a recurrent state makes packed rows wrong, so such models compute every row whole."""
    if architecture == "state space":
        config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
        model = MambaForCausalLM(config).eval()
    else:
        model = Gemma2ForCausalLM(
            Gemma2Config(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                sliding_window=4,
            )
        ).eval()

    assert not TokenScorer(model).shares_prompts
