"""From an experiment to who answers: what is shared, what is refused, what `plan` says, and how a run ends."""

import asyncio
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.learner.learner import TorchLearner
from gnomon.models.lora import merged_tensors
from gnomon.models.transfer.fingerprint import fingerprints
from gnomon.records.jsonl import read_rows
from gnomon.training import build_workers
from gnomon.training.build_workers import (
    describe_engines,
    load_network,
    serve,
    serve_alone,
    snapshot_transform,
)
from gnomon.training.checks import check_room, check_serving, check_settings
from gnomon.training.resolve import Resolved

TINY = ("rollouts_per_step=8", "algorithm.num_generations=2", "task.size=40", "grading.workers=1", "device=cpu")
SAMPLING = Sampling(max_completion_length=6, stop_ids=(257,))


def tiny(*overrides: str) -> Resolved:
    return Resolved(load("tiny", [*TINY, *overrides]).experiment)


def test_the_card_tells_functions_in_c_from_others(way: str):
    """A name that tells sources, compiler and processor, another for each precision; none where torch computes."""
    names = {tiny(f"learner.precision={precision}").native for precision in ("fp32", "bf16")}

    assert len(names) == (2 if way == "native" else 1)
    assert all(len(name) == 32 for name in names) if way == "native" else names == {""}


@pytest.mark.parametrize(
    ("overrides", "is_shared", "copies"),
    [
        ((), True, 0),
        (("max_staleness=1",), False, 1),
        (("max_staleness=measured",), False, 1),
        (("learner.processes=2",), False, 1),
        (("engine.rounding=int8",), False, 1),
        (("engine.count=3",), False, 3),
        (("engine=vllm",), False, 1),
        (("engine=vllm", "engine.server=start", "engine.count=2"), False, 2),
        (("engine=vllm", "engine.server=http://127.0.0.1:8000"), False, 0),
    ],
)
def test_one_local_engine_at_staleness_0_shares_the_learners_weights(
    overrides: tuple[str, ...], is_shared: bool, copies: int
):
    """Every other engine on this machine has weights of its own."""
    resolved = tiny(*overrides)

    assert resolved.shares_weights == is_shared
    assert resolved.own_copies == copies


REFUSED = {
    "more engines than prompts": (
        ("engine.count=5",),
        "engine.count = 5 exceeds the 4 prompts in flight; the extra engines would stay idle",
    ),
    "an address is one engine": (
        ("engine=vllm", "engine.count=2", "engine.server=http://127.0.0.1:8000"),
        r"is one engine, and engine.count = 2; set engine.count = 1",
    ),
    "routing that vLLM does not tell": (
        ("model=tiny-moe", "engine=vllm", "algorithm.routing=behavior"),
        "does not ask vLLM which",
    ),
    "nothing to release": (("engine.sleeps=true",), "answers with the learner's own weights, so there is nothing to"),
    "a critic that is taught between answers": (
        ("engine.sleeps=true", "learner.processes=2", "algorithm=vc-ppo"),
        "value pre-training asks between its updates",
    ),
    "a place for two engines": (
        ("engine.sleeps=true", "learner.processes=2", "engine.count=3", "cluster=ray"),
        "engine.count = 3 with learner.processes = 2; set engine.count = 2 or less",
    ),
    "code that vLLM does not run": (("engine=vllm", "trust_remote_code=true"), 'set engine.kind = "local"'),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_engines_that_cannot_be_meant_are_refused(overrides: tuple[str, ...], message: str):
    """Before anything is loaded, with what to set instead."""
    with pytest.raises(ConfigError, match=message):
        check_serving(tiny(*overrides))


GUESSING = ["environment.use=guess.py:Guess", "rollouts_per_step=100000", "environment.max_concurrent=100000"]
SERVERS = ["engine=vllm", "engine.server=start"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.processes=100000"], "learner.processes = 100000 needs 60,000.0 GiB for libraries alone"),
        (["learner.processes=6"], "learner.processes = 6 needs 3.6 GiB for libraries alone, and 3.0 GiB are free"),
        (["grading.workers=1000"], "grading.workers = 1000 needs 3.9 GiB"),
        (["grading.workers=1000"], "set grading.workers = 768$"),
        (["cluster=ray", "cluster.graders=1000"], "cluster.graders = 1000 needs 600.0 GiB"),
        (["cluster=ray", "learner.processes=9"], "learner.processes = 9 needs 5.4 GiB"),
        (["cluster=ray", "engine.count=8"], "engine.count = 8 needs 4.8 GiB"),
        (["cluster=ray", "cluster.graders=2", "grading.workers=400"], "grading.workers = 400 needs 3.1 GiB"),
        ([*SERVERS, "engine.count=6"], "engine.count = 6 needs 3.6 GiB"),
        ([*SERVERS, "engine.tensor_parallel=1000"], "engine.tensor_parallel = 1000 needs 600.0 GiB"),
        (GUESSING, "environment.max_concurrent = 100000 needs 390.6 GiB"),
    ],
)
def test_more_processes_than_memory_holds_are_refused(overrides: list[str], said: str):
    """A hundred thousand would stop the machine while they start, whatever setting begins them."""
    with pytest.raises(ConfigError, match=said):
        check_room(tiny(*overrides).experiment.local_processes, 3 * 2**30)


def test_an_evaluation_counts_among_the_conversations_at_once():
    """As many environments are begun as questions are asked then, where these are more than a step's answers."""
    held = ["environment.use=guess.py:Guess", "environment.max_concurrent=9000", "rollouts_per_step=64"]
    cases = (([], 64), (["held_out.size=300", "evaluation.samples=2"], 600), (["held_out.size=9001"], 9000))
    for given, begun in cases:
        found = tiny(*held, "evaluation.samples=1", *given).experiment.local_processes
        assert found["environment.max_concurrent"][1] == begun


@pytest.mark.parametrize(
    "overrides",
    [
        ["learner.processes=4"],
        ["grading.workers=200"],
        ["cluster=ray", "cluster.address=10.0.0.1:6379", "cluster.graders=900", "learner.processes=64"],
        ["engine=vllm", "engine.server=http://127.0.0.1:1"],
        ["environment.use=guess.py:Guess", "environment.max_concurrent=100000"],  # no more than answers in flight
    ],
)
def test_processes_that_fit_or_are_elsewhere_are_not_refused(overrides: list[str]):
    """Those of a cluster that is joined take another machine's memory; an unknown memory refuses nothing."""
    check_room(tiny(*overrides).experiment.local_processes, 3 * 2**30)
    check_room(tiny("learner.processes=16").experiment.local_processes, None)


def test_more_processes_than_files_may_be_open_are_refused():
    """Each has a connection; found out where the first one cannot start, a model would be loaded already."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        check_room(tiny("grading.workers=180").experiment.local_processes, None)
        with pytest.raises(ConfigError, match=r"200 processes are more than ulimit -n, 256, allows; .* ulimit -n 328$"):
            check_room(tiny("grading.workers=200").experiment.local_processes, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


def test_what_cannot_be_had_is_refused_with_all_settings():
    """In `plan` and `train`, before anything is loaded."""
    with pytest.raises(ConfigError, match=r"learner.processes = 100000 needs 60,000.0 GiB"):
        check_settings(tiny("learner.processes=100000"))


def test_vllm_is_not_put_to_sleep():
    """TRL's and verl's names for it are understood, and refused with vLLM before anything is loaded."""
    with pytest.raises(ConfigError, match=r"engine\.kind = 'vllm' keeps its memory between steps"):
        tiny("vllm_enable_sleep_mode=true", "engine=vllm")


def test_an_engine_that_sleeps_is_said():
    """In the plan, in the run's card."""
    awake, asleep = tiny("learner.processes=2"), tiny("learner.processes=2", "engine.sleeps=true")

    check_serving(asleep)
    check_serving(tiny("engine.sleeps=true", "max_staleness=1"))
    assert "which it releases while the learner works" in describe_engines(asleep)
    assert "releases" not in describe_engines(awake)


def test_prompts_of_later_steps_count_as_on_their_way():
    """Five engines have something to do when two steps of four prompts are asked at once."""
    check_serving(tiny("engine.count=5", "max_staleness=1"))


def test_a_missing_vllm_is_said_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One message that names the interpreter, exit code 2: for training, planning and evaluating alike."""
    missing = ["engine=vllm", "engine.server=start", f"engine.python={tmp_path}/python"]
    verbs = (["train", "tiny"], ["plan", "tiny"], ["evaluate", "tiny", "--task", "arithmetic"])
    for verb in verbs:
        assert main([*verb, *missing]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert str(tmp_path) in said


SAID = [
    ((), "They are drawn in this process, from the learner's own weights, at most 64 at once."),
    (
        ("engine.count=2", "engine.rounding=fp8"),
        "by 2 local engines in this process, each with weights of its own, rounded to fp8 whenever they are sent",
    ),
    (("engine=vllm",), "by 1 vLLM engine in this process, with weights of its own, at most 64 at once by each."),
    (("engine=vllm", "engine.server=start", "engine.count=3"), "by 3 vLLM servers started for it, each with weights"),
    (("engine=vllm", "engine.server=http://127.0.0.1:1"), "by 1 vLLM server at http://127.0.0.1:1, with weights of"),
]


@pytest.mark.parametrize(("overrides", "sentence"), SAID)
def test_who_answers_is_said_in_words(overrides: tuple[str, ...], sentence: str):
    """`gnomon plan` says it after how many answers are asked for."""
    assert sentence in describe_engines(tiny(*overrides))


async def answers(pool: EnginePool, snapshot: Snapshot | None = None) -> list[tuple[int, ...]]:
    """Return the tokens of eight answers, and close the pool."""
    if snapshot is not None:
        await pool.load(snapshot)
    groups = await asyncio.gather(*(pool.generate([50, 43, 50, n], [n, n + 100], SAMPLING) for n in range(4)))
    await pool.close()
    return [done.tokens for group in groups for done in group]


def test_several_engines_answer_as_the_shared_one():
    """One that shares the weights, one with its own and three of those: the same draws, the same tokens."""
    found = []
    for overrides in ((), ("max_staleness=1",), ("engine.count=3",), ("lora.rank=2", "engine.count=2")):
        resolved = tiny("learner.precision=fp32", *overrides)
        model = load_network(resolved)
        learner = TorchLearner(model, resolved.experiment.learner, 1, None, None, None)
        found.append(asyncio.run(answers(serve(resolved, model, print), learner.snapshot())))
    assert found == [found[0]] * 4

    alone = asyncio.run(answers(serve_alone(tiny("learner.precision=fp32", "engine.count=3"), print)))
    assert alone == found[0]


def test_rounded_weights_arrive_rounded():
    """What engines hold is what was sent, all of them the same, and rounded it is not what the learner has."""

    async def held(resolved: Resolved, model: Any) -> Any:
        pool = serve(resolved, model, print)
        send = snapshot_transform(resolved, model)
        plain = Snapshot(0, lambda: merged_tensors(model))
        sent = plain if send is None else send(plain)
        await pool.load(sent)
        prints = await pool.fingerprints()
        await pool.close()
        return prints, fingerprints(sent.tensors()), fingerprints(plain.tensors())

    for rounding in ("none", "int4"):
        resolved = tiny("learner.precision=fp32", "engine.count=2", f"engine.rounding={rounding}")
        found, sent, plain = asyncio.run(held(resolved, load_network(resolved)))
        assert found == sent
        assert (found == plain) == (rounding == "none")


def test_a_run_with_several_engines_learns_from_all_and_counts_them(tmp_path: Path):
    """The metrics of every step say how many engines work; training goes as with one engine of its own weights."""
    for name, count in (("one", 1), ("three", 3)):
        command = ["train", "tiny", *TINY, "learner.precision=fp32", "steps=2", "engine.rounding=fp8"]
        command += [f"engine.count={count}", "evaluation.before=false", "--run-dir", str(tmp_path / name)]
        assert main(command) == 0
    one, three = ([*read_rows(tmp_path / name / "metrics.jsonl")] for name in ("one", "three"))

    assert [row["engines/alive"] for row in three] == [3, 3]
    assert [row["engines/lost"] + row["engines/asked_again"] for row in three] == [0, 0]
    assert [row["rollout/reward_mean"] for row in one] == [row["rollout/reward_mean"] for row in three]
    assert one[-1]["loss/policy"] == pytest.approx(three[-1]["loss/policy"], abs=1e-6)


class Mortal(LocalEngine):
    """A real engine that answers ``good`` calls, and then never again: it raises, or it says nothing."""

    def __init__(self, resolved: Resolved, good: int, is_silent: bool = False) -> None:
        super().__init__(load_network(resolved), shared=False)
        self.left, self.is_silent = good, is_silent

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.left -= 1
        if self.left < 0 and self.is_silent:
            await asyncio.sleep(1e6)
        if self.left < 0:
            raise EngineError("CUDA error: device-side assert")
        return await super().generate(prompt, keys, sampling)


def trained(monkeypatch: pytest.MonkeyPatch, run: Path, is_silent: bool, **good: int) -> int:
    """Return the exit code of a run of four steps of four groups each, whose engines answer so many of them."""

    def serve_mortals(resolved: Resolved, model: object, warn: Callable[[str], None]) -> EnginePool:
        engines = {name: Mortal(resolved, calls, is_silent) for name, calls in good.items()}
        return EnginePool(engines, 1.0, warn=warn)

    monkeypatch.setattr(build_workers, "serve", serve_mortals)
    fp32 = "learner.precision=fp32"
    return main(["train", "tiny", *TINY, fp32, "steps=4", "evaluation.before=false", "--run-dir", str(run)])


@pytest.mark.parametrize(
    ("is_silent", "cause"), [(False, "CUDA error: device-side assert"), (True, "it finished nothing in 1 seconds")]
)
def test_when_the_last_engine_goes_the_run_stops_and_names_it(
    is_silent: bool,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """Exit code 1 and one message; what was trained before is on record."""
    code = trained(monkeypatch, tmp_path / "run", is_silent, gpu=6)
    said = capsys.readouterr().err

    assert code == 1
    assert f"gnomon train: the run failed: no engine is left to answer (gpu: {cause}" in said
    assert "Traceback" not in said
    assert len([*read_rows(tmp_path / "run" / "metrics.jsonl")]) == 1


@pytest.mark.parametrize("is_silent", [False, True])
def test_when_one_of_several_goes_the_run_goes_on(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Every step has all its groups, each once; what is sampled is what a run without the fault samples."""
    assert trained(monkeypatch, tmp_path / "broken", is_silent, a=3, b=10**6) == 0
    assert trained(monkeypatch, tmp_path / "whole", is_silent, a=10**6, b=10**6) == 0
    said = capsys.readouterr().err
    broken = [*read_rows(tmp_path / "broken" / "metrics.jsonl")]

    assert said.count("lost engine a: ") == 1
    assert "1 of 2 engines go on" in said
    assert [row["engines/alive"] for row in broken] == [2, 1, 1, 1]
    assert [row["engines/lost"] for row in broken] == [0, 1, 0, 0]
    assert broken[1]["engines/asked_again"] >= 1
    first, second = (sampled(tmp_path / name) for name in ("broken", "whole"))
    assert first == second
    assert len(first) == 4 * 8


def sampled(run: Path) -> list[tuple[str, list[int]]]:
    """Return task and tokens of every rollout that was recorded, in order."""
    rows = [row for path in sorted((run / "rollouts").iterdir()) for row in read_rows(path)]
    return [(row["task_id"], row["response"]) for row in rows]
