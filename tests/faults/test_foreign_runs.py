"""A run of somebody else, any file of it changed at will: every reader ends in words, in time, and runs nothing."""

import contextlib
import copy
import json
import os
import pickle
import random
import shutil
import signal
import struct
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.faults.test_files import NASTY, changed, places
from tests.faults.test_forged_states import ODD
from tests.faults.test_model_files import CONFIGS, tried
from tests.faults.test_run_files import look, or_ours
from tests.random_model import RANDOM

from gnomon.analysis.compare.run import Design, RunLimit
from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.insight.watch.watcher import Watcher
from gnomon.models.load import load_tokenizer
from gnomon.records.batches import read_batch
from gnomon.records.checkpoints import read_states
from gnomon.records.directory import RunDirectory, lock_owner
from gnomon.records.jsonl import step_rows
from gnomon.records.manifest import write_manifest
from gnomon.records.reading import RunRecord
from gnomon.records.run_card import end_of, questions_of
from gnomon.tasks.chat import ChatRenderer
from gnomon.training.continuation import changed_code, find_resume_point, latest_session
from gnomon.training.eval_spec import EvalSpec, EvalTarget
from gnomon.training.evaluate import read_evaluations
from gnomon.training.nonfinite_guard import refused_in_a_row

QUICK, THOROUGH, COMMANDS = 3, 1000, 3200
RUN = [
    "algorithm=ppo", "algorithm.critic.pretraining={steps=1}", "algorithm.num_generations=2", "steps=2",
    "task.size=40", "rollouts_per_step=8", "held_out.size=3", "checkpoints.every=1", "grading.workers=1",
    "sampling.max_completion_length=4", "records.batches=true",
]  # fmt: skip
STEP = "checkpoints/step-1"
RECORDS = [
    "experiment.toml", "run.json", "metrics.jsonl", "evaluations.jsonl", "findings.jsonl", "diagnosis.json",
    "pretraining.jsonl", "rollouts/step-000001.jsonl", "evaluations/step-000000.jsonl", "batches/step-000001.json",
    ".lock", "checkpoints/best.json", f"{STEP}/manifest.json",
]  # fmt: skip
MODELS = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "model.safetensors.index.json", "model.safetensors",
]  # fmt: skip
CRITIC = ["critic/config.json", "critic/model.safetensors"]
PARTS = ["curriculum", "generators", "learner", "meter", "stream"]
STATES = [f"state/{part}.{kind}" for part in PARTS for kind in ("json", "safetensors")]
FILES = [*RECORDS, *(f"{STEP}/{name}" for name in (*MODELS, *CRITIC, *STATES))]
TEMPLATES = [
    "{{ cycler.__init__.__globals__.os.system('touch RAN') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}", "{{ 'x' * 10**12 }}",
    "{% include 'evil.py' %}", "{{ raise_exception('x') }}", "{% set x = namespace() %}{{ x.__init__.__globals__ }}",
    "{{ messages.__class__.__base__ }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 9**9**9**9 }}",
    "{{ messages | map(attribute='__class__') | list }}", "{% generation %}", "{{ lipsum.__globals__['os'] }}",
]  # fmt: skip

KEYS = [
    "auto_map", "chat_template", "trust_remote_code", "quantization_config", "tokenizer_class", "architectures",
    "attn_implementation", "custom_generate", "__class__", "extra_special_tokens", "step", "seal", "resumed",
]  # fmt: skip


class _Evil:
    """What a pickle of it does when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with every kind of file, broken off after its checkpoint of step 1, and code beside it."""
    folder = tmp_path_factory.mktemp("foreign")
    run = folder / "base"
    assert main(["train", RANDOM, *RUN, "--run-dir", str(run)]) == 0
    shutil.rmtree(run / "checkpoints" / "step-2")
    (run / "checkpoints" / "best.json").write_text('{"step": 1}')
    (run / "findings.jsonl").write_text('{"step": 1, "rule": "a", "severity": "note"}\n')
    (run / "diagnosis.json").write_text('{"findings": []}')
    model = run / STEP
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    (model / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    sealed_at(model)
    for place in (folder, run, model):
        (place / "evil.py").write_text(
            f"import pathlib\npathlib.Path({str(folder / 'RAN')!r}).touch()\nclass X:\n    pass\n"
        )
    return run


def sealed_at(folder: Path) -> None:
    """Write the manifest of a changed checkpoint anew, of its own step."""
    (folder / "manifest.json").unlink()
    write_manifest(folder, 1)


def canaries(run: Path) -> list[Any]:
    """Return values that would run a stranger's code if anything did."""
    own = str(run / "evil.py")
    auto = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.X")
    return [
        f"{own}:X", "evil:X", {"piece": f"{own}:X"}, {"kind": "function", "function": f"{own}:X"},
        [{"kind": "function", "function": f"{own}:X"}], auto, {"auto_map": auto}, True, own,
        "gnomon.training.api:train", "os:system", "../../../etc/passwd", *TEMPLATES,
    ]  # fmt: skip


def some_value(random: random.Random, run: Path) -> Any:
    return copy.deepcopy(random.choice([*ODD, *canaries(run)]))


def mutated(content: bytes, name: str, random: random.Random, run: Path) -> bytes:
    """Return the content of a file, changed: a value of it, its keys, some bytes, its length, or all of it."""
    kind = random.randrange(10)
    if kind == 0:
        return random.choice([*NASTY, *CONFIGS, pickle.dumps(_Evil(run.parent / "RAN")), b"\x80\x04.", b"PK\3\4"])
    if kind == 1:
        return content[: random.randrange(len(content) + 1)]
    if kind == 2:
        at = random.randrange(min(len(content), 3000) + 1)
        return content[:at] + random.randbytes(random.randrange(4)) + content[at + random.randrange(4) :]
    if name.endswith(".jinja"):
        return random.choice(TEMPLATES).encode() + (content if random.random() < 0.5 else b"")
    if name.endswith(".safetensors"):
        return with_header(content, random, run)
    if name.endswith(".toml"):
        return with_line(content, random, run)
    if name.endswith((".json", ".jsonl", ".lock")):
        lines = content.split(b"\n") if name.endswith(".jsonl") else [content]
        at = random.randrange(len(lines))
        lines[at] = odd_json(lines[at] or b"{}", random, run)
        return b"\n".join(lines)
    return random.randbytes(100)


def odd_json(line: bytes, random: random.Random, run: Path) -> bytes:
    """Return JSON of which one place is another value, or which has one more key."""
    value = json.loads(line)
    if isinstance(value, dict) and random.random() < 0.3:
        value[random.choice(KEYS)] = some_value(random, run)
        return json.dumps(value).encode()
    if isinstance(value, dict) and value and random.random() < 0.2:
        del value[random.choice(list(value))]
        return json.dumps(value).encode()
    return json.dumps(changed(value, random.choice(places(value)), some_value(random, run))).encode()


def with_header(content: bytes, random: random.Random, run: Path) -> bytes:
    """Return a file of tensors with another header of the length that it says, or that it does not."""
    (length,) = struct.unpack("<Q", content[:8])
    header = odd_json(content[8 : 8 + length], random, run)
    said = len(header) if random.random() < 0.8 else random.choice([0, 1, 2**63, 2**64 - 1, length])
    return struct.pack("<Q", said) + header + content[8 + length :]


def with_line(content: bytes, random: random.Random, run: Path) -> bytes:
    """Return TOML of which one line has another value, or is left out or written twice."""
    lines = content.decode().splitlines()
    at = random.choice([n for n, line in enumerate(lines) if line])
    key = lines[at].partition("=")[0]
    value = some_value(random, run)
    texts = [json.dumps(value) if not isinstance(value, dict) else '{piece = "evil:X"}', "", lines[at] * 2]
    lines[at] = f"{key}= {texts[0]}" if random.random() < 0.8 else random.choice(texts[1:])
    if random.random() < 0.2:
        lines.insert(0, f"trust_remote_code = {random.choice(['true', '1', 'false'])}")
    return "\n".join(lines).encode()


@contextlib.contextmanager
def with_content(run: Path, name: str, content: bytes) -> Iterator[None]:
    """Have that content in a file of the run during the block; a checkpoint's manifest is not told."""
    path = run / name
    before = path.read_bytes() if path.is_file() else None
    path.write_bytes(content)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_bytes(before)


def as_resume_begins(run: Path) -> None:
    """Read the experiment and find the checkpoint as `gnomon resume` does, which runs what the run names."""
    directory = RunDirectory(run)
    or_ours(lambda: find_resume_point(directory, load(directory.experiment).experiment))


def as_resume_reads(run: Path) -> None:
    """Read what `gnomon resume` reads of the records before it loads a model."""
    directory = RunDirectory(run)
    or_ours(lambda: changed_code(latest_session(run), {}))
    or_ours(lambda: (questions_of(directory.card), end_of(RunRecord(run).card())))
    or_ours(lambda: refused_in_a_row(list(step_rows(directory.metrics))))
    or_ours(lambda: list(step_rows(directory.pretraining)))
    or_ours(lambda: read_evaluations(run / "evaluations.jsonl"))


def as_begun(run: Path) -> None:
    """Read the experiment, and which checkpoint is taken, as `evaluate` and `compare` do."""
    directory = RunDirectory(run)
    or_ours(lambda: RunDirectory.reopen(run).close())
    or_ours(lambda: EvalSpec().experiments([EvalTarget(run)]))
    or_ours(lambda: EvalSpec().experiments([EvalTarget(run, "best")]))
    or_ours(lambda: Design.of(str(directory.experiment), [], ["grpo", "rloo"], 2, RunLimit(10, "tokens")))


def as_model(run: Path) -> None:
    """Read a checkpoint's model in every way there is, and render a question."""
    or_ours(lambda: tried(run / STEP, is_loaded=False))
    or_ours(lambda: ChatRenderer(load_tokenizer(str(run / STEP)), "Be brief.")("What is 1+1?"))


def as_locked(run: Path) -> None:
    """Ask who has the run, look at it, and take it as `resume` and `train` do."""
    lock_owner(run)
    Watcher(run).look()
    or_ours(lambda: RunDirectory.reopen(run).close())
    or_ours(lambda: RunDirectory.check_free(run))


def readers_of(name: str) -> list[Callable[[Path], Any]]:
    """Return who reads a file of that name in milliseconds."""
    if name == ".lock":
        return [as_locked]
    if name.startswith("batches"):
        return [lambda run: or_ours(lambda: read_batch(run / name))]
    if "/state/" in name:
        return [lambda run: or_ours(lambda: read_states(run / STEP / "state"))]
    if name.startswith(STEP) and "manifest" not in name:
        return [as_model]
    begun = [as_begun, as_resume_begins]
    if name.startswith("checkpoints"):
        return begun
    return [look, as_resume_reads, *(begun if name in ("experiment.toml", "run.json") else [])]


@contextlib.contextmanager
def in_time(seconds: int, what: str) -> Iterator[None]:
    """Fail where the block takes longer."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it hung: {what}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def mutations(base: Path, name: str, count: int, seed: str) -> Iterator[bytes]:
    """Yield changed contents of a file; the same ones every time."""
    draws = random.Random(f"{name} {seed}")
    content = (base / name).read_bytes() if (base / name).is_file() else b'{"weight_map": {"a": "model.safetensors"}}'
    for _ in range(count):
        yield mutated(content, name, draws, base)


def read_changed(base: Path, tmp_path: Path, name: str, count: int) -> None:
    """Have every cheap reader read the file, changed that often."""
    run, ran = tmp_path / "run", base.parent / "RAN"
    shutil.copytree(base, run)
    ran.unlink(missing_ok=True)
    for number, content in enumerate(mutations(base, name, count, "readers")):
        for read in readers_of(name):
            with with_content(run, name, content), in_time(30, f"{name} {number} {content[:200]!r}"):
                read(run)
            if read is as_resume_begins:
                ran.unlink(missing_ok=True)
            assert not ran.exists(), (name, number, content[:500])


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_ends_in_words_and_runs_nothing(base: Path, tmp_path: Path, name: str):
    """Of each file that is read back, a few changes by all that read it in milliseconds."""
    read_changed(base, tmp_path, name, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FILES)
def test_a_thousand_changes_of_each_file_end_in_words_and_run_nothing(base: Path, tmp_path: Path, name: str):
    """Of each file that is read back, a thousand changes by all that read it in milliseconds."""
    read_changed(base, tmp_path, name, THOROUGH)


def verbs(run: Path, place: Path) -> list[list[str]]:
    """Return the commands that read a run."""
    compared = ["--algorithms", "grpo,rloo", "--steps", "0", "--seeds", "2", "--out", str(place / "compared")]
    return [
        ["report", str(run)], ["doctor", str(run)], ["watch", str(run), "--once"], ["evaluate", str(run)],
        ["dissect", str(run / "batches" / "step-000001.json"), "--algorithms", "grpo"],
        ["compare", str(run / "experiment.toml"), *compared], ["export", str(run), str(place / "model")],
        ["resume", str(run)],
    ]  # fmt: skip


def ended(given: list[str], said: Path, seconds: int = 120) -> int:
    """Return how a command ended in a copy of this process; minus a signal where one ended it, as a hang does."""
    if (child := os.fork()) == 0:
        code = 70
        try:
            os.setsid()
            signal.alarm(seconds)  # nobody handles it: it ends a loop in C, too
            with said.open("w") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(file):
                code = main(given)
        except BaseException:
            said.write_text(said.read_text() + traceback.format_exc())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def tried_by_commands(base: Path, tmp_path: Path, numbers: range) -> None:
    """Have a command read a run of which one file is changed: by turns every command, and every file."""
    ran, said = base.parent / "RAN", tmp_path / "said"
    changes = {name: list(mutations(base, name, numbers.stop // len(FILES) + 1, "commands")) for name in FILES}
    for number in numbers:
        place = tmp_path / "place"
        theirs = place / "theirs"
        shutil.copytree(base, theirs)
        name = FILES[number % len(FILES)]
        content = changes[name][number // len(FILES)]
        (theirs / name).write_bytes(content)
        if name.startswith(STEP) and not name.endswith("manifest.json"):
            sealed_at(theirs / STEP)
        ran.unlink(missing_ok=True)
        commands = verbs(theirs, place)
        given = commands[number % len(commands)]
        what = (given[0], name, number, content[:500])
        code = ended(given, said)
        assert code in (0, 1, 2), (*what, code, said.read_text()[-2000:])
        assert "Traceback" not in said.read_text(), (*what, said.read_text()[-2000:])
        # Going on with a run runs what the run names, and says so.
        assert given[0] == "resume" or not ran.exists(), what
        shutil.rmtree(place)


@pytest.mark.slow
def test_whole_commands_end_in_words_and_run_nothing(base: Path, tmp_path: Path):
    """Thirty-three changes, one of each file, by report, doctor, watch, evaluate, dissect, compare, export, resume."""
    tried_by_commands(base, tmp_path, range(len(FILES)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(COMMANDS // 100))
def test_thousands_of_changes_by_whole_commands_end_in_words_and_run_nothing(base: Path, tmp_path: Path, part: int):
    """The same 3,200 times: each command reads each file twelve times, each time with another change."""
    tried_by_commands(base, tmp_path, range(part * 100, (part + 1) * 100))
