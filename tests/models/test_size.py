"""How large a model is, from its config alone."""

from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    PretrainedConfig,
    RecurrentGemmaConfig,
)

from gnomon.models.size import model_size

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
