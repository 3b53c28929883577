"""What vLLM reads otherwise than transformers is given to it as transformers reads it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf

from gnomon.core.errors import ConfigError
from gnomon.engines.vllm.engine import check_shared_process
from gnomon.models.hf_names import HfNames

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import asyncio, json, sys, torch
from pathlib import Path
from benchmarks.architectures import alone, made, wider
from gnomon.core.errors import ConfigError
from gnomon.engines.base import Sampling
from gnomon.engines.vllm.engine import VllmEngine
from tests.models.test_neighbors import FEW, MORE

async def main(name, folder):
    model = made(wider((FEW | MORE)[name])).eval()
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    engine = VllmEngine(folder, torch.float32, max_concurrent=2)
    far, refused = 0.0, []
    for length in (5, 60, 190):
        prompt = list(range(5, 5 + length))
        try:
            answers = await engine.generate(prompt, range(2), Sampling(max_completion_length=10))
        except ConfigError as error:
            refused.append(str(error))
            continue
        for done in answers:
            plain = alone(model, torch.tensor([*prompt, *done.tokens]), length)
            far = max(far, float((plain - torch.tensor(done.full_logprobs)).abs().max()))
    await engine.close()
    print(json.dumps([far, refused]))

with torch.no_grad():
    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["Phi-3, longrope", "qwen3 longrope", "cohere2"])
def test_rows_are_what_a_plain_forward_pass_makes_of_them(name: str, tmp_path: Path):
    """Positions of two tables: up to the first one's end, longer rows are refused. A window: on both sides of it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(tmp_path / "model")],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    far, refused = json.loads(done.stdout.splitlines()[-1])

    assert far < 1e-5
    assert len(refused) == ("longrope" in name)
    assert all("beyond the model's context of 192" in said for said in refused)


def test_a_model_whose_classes_vllm_would_change_needs_a_process_of_its_own(tmp_path: Path):
    """In one process the learner's own passes failed over an attribute that vLLM's wrapper reads."""
    size = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = hf.SmolLM3Config(**size, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
    hf.SmolLM3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'SmolLM3ForCausalLM, which vLLM runs by .*engine.server = "start"'):
        check_shared_process(str(tmp_path), HfNames(str(tmp_path)))

    check_shared_process("tiny", HfNames("tiny"))
