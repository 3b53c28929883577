"""One GPU: what is asked for, what is missing, and, on a second device that needs no GPU, that nothing stays behind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.algorithms import PRESETS
from gnomon.config.experiment import from_table, to_toml
from gnomon.core.errors import ConfigError
from gnomon.engines.sampler import Draws
from gnomon.learner.precision import resolve_precision
from gnomon.models.cpu.fused_decoder import FusedDecoder
from gnomon.models.cuda_graph_decoder import Recorded, StaticDecoder, fastest_decoder
from gnomon.models.decoder import choose_decoder
from gnomon.models.device import describe_device, memory_of, resolve_device
from gnomon.models.head import chunk_for
from gnomon.models.logprobs import TokenScorer
from gnomon.training.resolve import resolve

TABLE = {"model": "tiny", "task": "arithmetic", "algorithm": "grpo"}
PROGRAM = Path(__file__).with_name("on_second_device.py")
# Two devices of one processor: equal up to the order of sums in the head, which goes by blocks on a CPU.
CLOSE = 2e-5
QUICK = (
    "preset vapo", "adapters", "bfloat16", "changing devices", "engine", "publish to the device",
    "decoder StaticDecoder", "forgotten",
)  # fmt: skip


def compute(names: Sequence[str]) -> dict[str, Any]:
    """What the program says of these names; of all without names. A process of its own has the device."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), *names], capture_output=True, text=True, timeout=280, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    return compute(QUICK)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes PyTorch report so many GPUs."""

    def report(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        found = type("Found", (), {"name": "NVIDIA H200", "total_memory": 141 * 2**30})()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)

    return report


@pytest.mark.parametrize(
    ("asked", "count", "meant"),
    [("auto", 0, "cpu"), ("auto", 1, "cuda:0"), ("cpu", 1, "cpu"), ("cuda", 2, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_a_gpu_that_is_there_is_used(asked, count, meant, gpus):
    """ "auto" is the first GPU, or the CPU without one; every other word means what it says."""
    gpus(count)
    assert str(resolve_device(asked)) == meant


def test_a_gpu_that_is_missing_is_said_before_anything_is_loaded(gpus, monkeypatch):
    """Asking for a GPU that is not there says what is there, and what to do."""
    experiment = from_table({**TABLE, "device": "cuda"}).experiment
    gpus(0)
    with pytest.raises(ConfigError, match=r"device = 'cuda'.*(without CUDA|no usable NVIDIA GPU).*device = 'cpu'"):
        resolve(experiment)
    gpus(1)
    with pytest.raises(ConfigError, match=r"'cuda:3'.*1 GPU here, cuda:0 \(NVIDIA H200\); choose"):
        resolve_device("cuda:3")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpus(0)
    with pytest.raises(ConfigError, match=r"finds no usable NVIDIA GPU here \(CUDA_VISIBLE_DEVICES is ''\)"):
        resolve_device("cuda")


@pytest.mark.parametrize("asked", ["gpu", "cuda:", "cuda:x", "mps", "CPU", ""])
def test_other_words_are_refused(asked):
    """A word that is no device is refused when the experiment is read, with the four that are."""
    with pytest.raises(ConfigError, match="device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got"):
        from_table({**TABLE, "device": asked})


def test_the_record_keeps_the_word_and_decides_the_precision(gpus):
    """An experiment that says "auto" can go on elsewhere, in the precision that it began with."""
    gpus(1)
    experiment = resolve(from_table(TABLE).experiment).experiment
    assert experiment.device == "auto"
    assert experiment.learner.precision == "bf16"
    assert 'device = "auto"' in to_toml(experiment)
    assert from_table({**TABLE, "accelerator": "cpu"}).experiment.device == "cpu"


def test_the_card_names_the_gpu(gpus):
    """What a run ran on is named, with how float32 is multiplied: TF32 is not on."""
    gpus(1)
    said = describe_device(torch.device("cuda", 0))
    assert said.startswith("cuda:0 (NVIDIA H200, 141 GiB, CUDA ")
    assert said.endswith("float32 products: highest)")
    assert memory_of(torch.device("cuda", 0)) == 141 * 2**30
    assert resolve_precision("auto", "cuda:0") == "bf16"


def test_more_logits_are_held_on_a_gpu(gpus, make_model):
    """A CPU holds 64 MiB of logits, a GPU those that fit into a 64th of its memory, at most 8,192; 256 at least."""
    gpus(1)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (chunk_for(cpu, 151_936), chunk_for(cpu, 49_152, 2)) == (256, 682)
    model = make_model()
    assert TokenScorer(model).chunk_tokens == 2**24 // model.config.vocab_size
    assert chunk_for(gpu, 151_936) == 141 * 2**30 // (64 * 4 * 151_936)
    assert (chunk_for(gpu, 100), chunk_for(gpu, 10**9)) == (8192, 256)


def test_a_recorded_step_gives_the_models_own_answers(make_model):
    """`StaticDecoder` passes the script by which ways of decoding are chosen; on a CPU it is not tried."""
    model = make_model()
    assert isinstance(choose_decoder(model, [StaticDecoder]), StaticDecoder)
    assert type(fastest_decoder(model)) is FusedDecoder


def test_elsewhere_than_on_a_gpu_nothing_is_recorded():
    """On a CPU a function is called each time, so a changed buffer is seen."""
    buffer, recorded = torch.zeros(2), Recorded(torch.device("cpu"))
    assert recorded("double", lambda: buffer * 2).tolist() == [0, 0]
    buffer += 1
    assert recorded("double", lambda: buffer * 2).tolist() == [2, 2]


def test_draws_come_back_as_they_are():
    """Lists of what was drawn hold the same numbers, to the bit."""
    logprobs = torch.tensor([-0.1, -1e-30, -3.3333333])
    draws = Draws(torch.tensor([2**31, 0, 7]), logprobs, logprobs / 3)
    assert draws.listed() == ([2**31, 0, 7], logprobs.tolist(), (logprobs / 3).tolist())


@pytest.mark.parametrize("name", [n for n in QUICK if n.startswith(("preset", "decoder", "changing", "adapters"))])
def test_a_second_device_computes_what_the_cpu_does(name, quick):
    """Losses, gradients, optimizer, critic, checkpoints and logits are those of the CPU, on another device."""
    assert quick[name] < CLOSE, quick[name]


@pytest.mark.parametrize("name", [n for n in QUICK if n.startswith(("engine", "publish"))])
def test_a_second_device_draws_what_the_cpu_does(name, quick):
    """Sampled tokens are equal on both devices, also with weights that came from the other one."""
    assert quick[name] is True, quick[name]


def test_bfloat16_has_its_masters_where_it_is(quick):
    """A bfloat16 model and its float32 masters train on the second device, equal to bfloat16's rounding."""
    assert quick["bfloat16"] < 2e-2, quick["bfloat16"]


def test_a_forgotten_move_is_found(quick):
    """With the move of a micro-batch taken out, or a critic left behind, these tests fail as a GPU would."""
    assert len(quick["forgotten"]) == 2
    assert all("Expected all tensors to be on the same device" in said for said in quick["forgotten"])


@pytest.mark.slow
def test_every_preset_and_form_of_model_runs_on_a_second_device():
    """All algorithms, gradient checkpointing, mixtures with recorded routing, and all ways of decoding."""
    found = compute(())
    found.pop("forgotten")
    assert {f"preset {name}" for name in PRESETS} < found.keys()
    wrong = {
        name: value
        for name, value in found.items()
        if not (value is True or (isinstance(value, float) and value < (2e-2 if name == "bfloat16" else CLOSE)))
    }
    assert not wrong
