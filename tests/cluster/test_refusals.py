"""What is refused before anything is loaded or started, and in which words."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.forked import Forked, ended

from gnomon.cli.main import main
from gnomon.cluster import start
from gnomon.cluster.hook import resource_bundles
from gnomon.cluster.ray import ResourceBundle, asked, check_cluster
from gnomon.cluster.reaper import CLEAN_EXIT
from gnomon.cluster.start import HeadMonitor
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.core.sections import ClusterConfig
from gnomon.training.checks import check_staging
from gnomon.training.resolve import Resolved

NCCL = ("engine=vllm", "cluster.transfer=nccl")
MICRO = ("algorithm=p3o", "algorithm.scope=micro_batch")
TINY = ("device=cpu", "cluster=ray")


@pytest.mark.parametrize(
    "address",
    ["head", "ray:/head:1", "head:port", "http://head:8265", "head:123456", "head:65536", "head:0", ":1", "a b:1"],
)
def test_an_address_that_is_none_is_refused(address: str):
    """The message says which forms there are."""
    with pytest.raises(ConfigError, match=r"should be HOST:PORT .* ray://HOST:PORT"):
        ClusterConfig("ray", address)


def test_more_learners_than_there_are_machines_for_are_refused():
    """A slip of the finger would otherwise start as many programs as it says."""
    with pytest.raises(
        ConfigError, match=r"learner\.processes = 200000 is more than 100000, the most that can be meant"
    ):
        load("tiny", ["learner.processes=200000"])


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_cluster_is_named_to_whoever_plans_as_to_whoever_trains(verb: str, capsys: pytest.CaptureFixture[str]):
    """One option for both, which says no less than the key in the experiment."""
    assert main([verb, "tiny", "--cluster", "rya"]) == 2
    assert "cluster.address = 'rya': did you mean 'ray'?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([verb, "tiny", "--cluster", ""])
    assert "--cluster needs a place: ray, auto," in capsys.readouterr().err
    assert main([verb, "tiny", "steps=-1"]) == 2, "an option of one call is none of the next"
    assert "cluster" not in capsys.readouterr().err


@pytest.mark.parametrize(("word", "meant"), [("rya", "ray"), ("Ray", "ray"), ("uato", "auto"), ("nnoe", "none")])
def test_a_misspelt_word_for_a_cluster_is_told_the_nearest(word: str, meant: str):
    """It is no address, and the word that it looks like is named."""
    with pytest.raises(ConfigError, match=rf"^cluster\.address = '{word}': did you mean '{meant}'\? It should be HOST"):
        load("tiny", [f"cluster={word}"])


def test_auto_without_a_cluster_ends_at_once(tmp_path: Path):
    """One line of ours and none of Ray's, where no cluster runs, and where the last one that did is gone."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        gone = f"127.0.0.1:{one.getsockname()[1]}"
    # Ray looks for its servers among the machine's programs too, where other tests may have some.
    code = (
        "import sys, ray, psutil; from gnomon.cluster.start import join\n"
        "from gnomon.core.errors import ConfigError; from gnomon.core.sections import ClusterConfig\n"
        "psutil.process_iter = lambda names: iter(())\n"
        "try: join(ray, ClusterConfig('ray', 'auto'), print)\n"
        "except ConfigError as error: sys.exit(str(error))\n"
    )
    for address, words in (("", "no Ray cluster runs on this machine"), (gone, f"nobody answers at {gone}, which it")):
        if address:
            (tmp_path / "ray").mkdir(exist_ok=True)
            (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

        assert ran.stdout == ""
        assert ran.stderr.startswith(f"cluster.address = 'auto': {words}")
        assert ran.stderr.count("\n") == 1
        assert "`ray start --head`" in ran.stderr


@pytest.mark.parametrize(
    "address", ["head:6379", "10.0.0.1:6379", "[::1]:6379", "ray://head.example:10001", "auto", ""]
)
def test_every_form_of_address_is_taken(address: str):
    """A word alone stands for the table, on the command line and in TOML."""
    plan = ClusterConfig("ray", address)
    if address:
        quoted = f'"{address}"' if address.startswith("[") else address
        assert load("tiny", [f"cluster={quoted}"]).experiment.cluster == plan


def test_settings_of_a_cluster_stay_when_its_address_is_named():
    """`cluster=ray` does not undo what is said of it elsewhere."""
    plan = load("tiny", ["cluster.graders=3", "cluster=ray://head:1", "cluster.placement=spread"]).experiment.cluster

    assert plan == ClusterConfig("ray", "ray://head:1", graders=3, placement="spread")
    with pytest.raises(ConfigError, match=r"needs cluster\.kind = 'ray'"):
        load("tiny", ["cluster.address=head:1"])
    with pytest.raises(ConfigError, match=r"cluster\.graders must be at least 1"):
        load("tiny", ["cluster=ray", "cluster.graders=0"])


REFUSED = {
    "a GPU by its number": (("cluster=ray", "device=cuda:1"), "PyTorch|is one GPU of this machine"),
    "a server of vLLM's": (("engine.kind=vllm", "engine.server=start"), "each engine is a process of its own"),
    "a loss that depends on the cut": (("learner.processes=2", *MICRO), "cuts it otherwise"),
    "a broadcast to other engines": (
        ("cluster.transfer=nccl",),
        "nccl' is vLLM's own transfer, and engine.kind = 'loc",
    ),
    "a broadcast without GPUs": ((*NCCL,), "goes from GPU to GPU, and device = 'cpu' is none; set device = 'cuda'"),
    "offloading to where it computes": (("learner.offload=true",), "set learner.offload = false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_on_a_cluster_is_refused(name: str):
    """Before anything is loaded, with what to set instead."""
    overrides, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        check_staging(Resolved(load("tiny", [*TINY, *overrides]).experiment))


SENT = {
    "rounded": (("engine.rounding=int8",), "sends the learner's own numbers, and engine.rounding = 'int8'"),
    "adapters": (("lora.rank=2",), "sends whole weights, and with lora adapters travel alone"),
    "experts": (("model=tiny-moe",), "'tiny-moe' has others in its files"),
}


@pytest.mark.parametrize("name", SENT)
def test_weights_that_are_not_the_learners_own_are_not_broadcast(name: str):
    """With a GPU of another machine's: the object store takes them, and the message says so."""
    overrides, said = SENT[name]
    settings = [*NCCL, "cluster=ray://head:1", "device=cuda", "learner.precision=fp32", *overrides]
    with pytest.raises(ConfigError, match=f"{said}.*or set cluster.transfer = 'store'"):
        check_staging(Resolved(load("tiny", settings).experiment))


def test_a_broadcast_without_a_cluster_is_refused():
    """Nobody there could receive."""
    with pytest.raises(ConfigError, match=r"is a way of weights on a cluster; set cluster\.kind = 'ray'"):
        load("tiny", [*NCCL])


def test_a_run_takes_a_place_for_each_of_its_parts():
    """Graders take a CPU for each of their processes."""
    experiment = load("tiny", [*TINY, "learner.processes=2", "engine.count=3", "grading.workers=4"]).experiment

    assert resource_bundles(Resolved(experiment)) == [ResourceBundle("learner")] * 2 + [
        ResourceBundle("engine")
    ] * 3 + [ResourceBundle("grader", 4.0)]


def test_an_engine_of_several_parts_takes_them_of_one_machine():
    """A CPU each, and where there are GPUs, one each; said in words, and refused where it makes no sense."""
    plan = load("tiny", [*TINY, "engine=vllm", "engine.tensor_parallel=2", "engine.count=2"]).experiment

    assert resource_bundles(Resolved(plan))[1:3] == [ResourceBundle("engine", 2.0)] * 2
    assert asked([ResourceBundle("engine", 2.0, 2.0)] * 2) == "2 engines of 2 CPUs and 2 GPUs"
    with pytest.raises(ConfigError, match="gnomon's own engine holds its model on one device"):
        load("tiny", ["engine.tensor_parallel=2"])
    with pytest.raises(ConfigError, match="is there already; start it with --tensor-parallel"):
        load("tiny", ["engine=vllm", "engine.tensor_parallel=2", "engine.server=http://127.0.0.1:8777"])
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        load("tiny", ["engine=vllm", "engine.tensor_parallel=0"])


def test_more_gpus_than_this_machine_has_are_refused():
    """A cluster that is started here has what the machine has."""
    with pytest.raises(ConfigError, match="2 learners of 1 CPU and 1 GPU need 2 GPUs, and this machine has 1"):
        check_cluster(ClusterConfig("ray"), [ResourceBundle("learner", gpus=1.0)] * 2, 1)


def test_without_ray_the_extra_is_named():
    """Exit code 2 and one message, where Ray cannot be imported; nothing else of gnomon needs it."""
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from gnomon.cli.main import main\n"
        "sys.exit(main(['train', 'tiny', '--cluster', 'ray', 'device=cpu']))"
    )
    ran = ended(Forked([], code))

    assert ran.returncode == 2
    assert """not installed: ray (cluster = ray); run: pip install "ray[client]\"""" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nobody_listens_is_refused(form: str):
    """At once, before Ray is imported."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        address = form.format(one.getsockname()[1])
    with pytest.raises(ConfigError, match="nobody answers there"):
        check_cluster(ClusterConfig("ray", address), [ResourceBundle("learner")], 0)


def test_a_head_that_is_gone_or_silent_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Its port is closed, or it takes connections and does not answer; a moment is forgiven."""
    monkeypatch.setattr(start, "_PAUSE", 0.05)
    monkeypatch.setattr(start, "_ASK_SECONDS", 0.05)
    monkeypatch.setattr(start, "_CLOSED_SECONDS", 0.3)
    monkeypatch.setattr(start, "_SILENT_SECONDS", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        answering, silent = HeadMonitor(address, lambda: None), HeadMonitor(address, lambda: time.sleep(60))
        time.sleep(1.2)
        assert answering.fault == ""
        assert "has not answered for 0.6 s" in silent.fault
    time.sleep(0.8)
    assert f"the head of the Ray cluster at {address} is gone" in answering.fault
    answering.close()
    silent.close()


@pytest.mark.parametrize(("farewell", "is_said"), [(CLEAN_EXIT, False), (b"", True)])
def test_whoever_has_a_file_open_in_the_folder_is_ended(farewell: bytes, is_said: bool, tmp_path: Path):
    """When the run is gone; the folder is gone as well, and a run that did not take its leave is spoken of."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "log").write_text("")
    code = f"import time; file = open({str(folder / 'log')!r}); print('open', flush=True); time.sleep(100)"
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"open\n"
    sweeper = subprocess.Popen(
        [sys.executable, "-m", "gnomon.cluster.reaper", str(folder)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    _, said = sweeper.communicate(farewell, 30)

    assert agent.wait(5) != 0
    agent.stdout.close()
    assert not folder.exists()
    assert (b"ended without a word" in said) == is_said


def test_a_place_that_is_not_named_is_refused(capsys: pytest.CaptureFixture[str]):
    """A variable that is not set must not train on the machine at hand."""
    with pytest.raises(SystemExit, match="2"):
        main(["train", "tiny", "--cluster", ""])
    assert "--cluster needs a place" in capsys.readouterr().err


def test_a_cluster_that_cannot_be_reached_leaves_no_run(tmp_path: Path):
    """What listens is no Ray: nothing has happened, so the folder's name is free for the next try."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        code = main(
            ["train", "tiny", "--cluster", address, "cluster.start_seconds=3", "--run-dir", str(tmp_path / "run")]
        )
    assert code == 2
    assert not (tmp_path / "run").exists()
