"""Models that also read images are trained on text with vLLM as with the local engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.models.test_image_models import saved

from gnomon.records.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[3]
# Heads of 32: vLLM's kernels for CPUs know none smaller.
WIDER = dict.fromkeys(
    ("hidden_size", "out_hidden_size", "embed_dim", "projection_dim", "projector_input_dim", "projector_output_dim"), 64
) | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128}


@pytest.mark.parametrize(("family", "text"), [
    ("Gemma3", {}),
    ("Qwen2_5_VL", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}),
])  # fmt: skip
def test_a_run_is_answered_as_the_learner_scores(family: str, text: dict, tmp_path: Path):
    """Two steps: each version of the weights arrives, those for images too, and the engine scores as the learner."""
    folder = saved(family, tmp_path / "model", WIDER, text)
    done = subprocess.run(
        [
            sys.executable, "-m", "gnomon", "train", "tiny", f"model={folder}", "task.size=40",
            "algorithm.num_generations=4", "steps=2", "rollouts_per_step=8", "held_out.size=2",
                "sampling.max_completion_length=6", "learner.precision=fp32", "engine=vllm", "device=cpu",
            "--run-dir", str(tmp_path / "run"),
        ],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent / 'without_images'}:{ROOT / 'src'}"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    arrived = [row["arrival/canary_abs_mean_nats"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]

    assert len(arrived) == 2
    assert max(arrived) < 1e-5
