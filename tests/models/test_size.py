"""How large a model is, from its config alone."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MambaConfig,
    MambaForCausalLM,
    PretrainedConfig,
    RecurrentGemmaConfig,
)

from gnomon.models.size import foreseen_slow, model_size

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(**SMALL),
        Mamba2Config(**SMALL, num_heads=4, head_dim=16, n_groups=1),
        RecurrentGemmaConfig(**SMALL, num_attention_heads=2, intermediate_size=64, lru_width=32),
        LlamaConfig(**SMALL, num_attention_heads=2, intermediate_size=64),
    ],
    ids=lambda config: str(config.model_type),
)
def test_a_model_of_any_kind_has_a_size(config: PretrainedConfig, tmp_path: Path):
    """State-space models, whose configs name no attention heads, are no exception."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    size = model_size(str(tmp_path))

    assert size.parameters > 0
    assert size.layers == 2


def test_a_fall_is_foreseen_on_a_small_model_of_the_same_code():
    """Of a model without weights; one that is too large to try, or falls nowhere, has none to say."""
    with torch.device("meta"):
        mamba = MambaForCausalLM(MambaConfig(hidden_size=64, state_size=8))
        llama = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=4))
        wide = MambaForCausalLM(MambaConfig(hidden_size=8192, num_hidden_layers=2))
    before = torch.random.get_rng_state()
    [said] = foreseen_slow(mamba)

    assert "MambaForCausalLM, so only prompts of one length" in said
    assert (foreseen_slow(llama), foreseen_slow(wide)) == ((), ())
    assert torch.equal(torch.random.get_rng_state(), before)
