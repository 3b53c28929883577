"""The reference implementation of log-probabilities: a plain forward pass that every faster way must agree with."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gnomon.models.forward import Forward


@torch.no_grad()
def response_logprobs(
    model: nn.Module, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> list[float]:
    """Return the log-probability of each token of ``response`` after ``prompt``, in nats, in float32.

    One row, without a cache, in the model's own precision.

    Args:
        model: A causal language model.
        prompt: At least one token, which predicts the response's first token.
        response: Token ids.
        temperature: Above 0; divides the logits.
    """
    if not response:
        return []
    ids = torch.tensor([[*prompt, *response]])
    logits: Tensor = Forward(model)(ids, keep=len(response) + 1, use_cache=False).logits
    # (responses' tokens, vocabulary): the position before each token predicts it.
    log_policy = (logits[0, -len(response) - 1 : -1].float() / temperature).log_softmax(-1)
    chosen = torch.tensor(response, device=log_policy.device)[:, None]
    scores: list[float] = log_policy.gather(1, chosen)[:, 0].tolist()
    return scores
