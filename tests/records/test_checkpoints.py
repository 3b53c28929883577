"""A checkpoint is complete and unchanged, or it is not used."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gnomon.core.errors import CheckpointError
from gnomon.core.types import State
from gnomon.records.checkpoints import Checkpoints, load
from gnomon.records.manifest import find_damage, write_manifest

SOURCE = Path(__file__).resolve().parents[2] / "src"


def model_files(folder: Path) -> None:
    """Write what stands for a Hugging Face model."""
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.ones(3)}, folder / "model.safetensors")


def parts(step: int) -> dict[str, State]:
    """Return a state that says which step it is of."""
    return {"learner": State({"w": torch.full((4,), float(step))}, {"step": step}), "curriculum": State()}


def saved(directory: Path, *steps: int, keep_last: int = 9) -> Checkpoints:
    """Return checkpoints of these steps."""
    checkpoints = Checkpoints(directory, keep_last)
    for step in steps:
        checkpoints.save(step, parts(step), model_files)
    return checkpoints


def names(directory: Path) -> list[str]:
    """Return what is in the folder, hidden or not."""
    return sorted(os.listdir(directory))


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one undamaged checkpoint, to be copied."""
    return saved(tmp_path_factory.mktemp("sound"), 5).directory / "step-5"


def test_what_is_saved_is_loaded(tmp_path: Path):
    """Model files at the top, a state per part, a manifest; the newest is found and read back."""
    found = saved(tmp_path, 3, 12).newest()

    assert found is not None
    assert (found.step, found.warnings) == (12, ())
    assert names(found.path) == ["config.json", "manifest.json", "model.safetensors", "state"]
    assert names(found.path / "state") == [
        "curriculum.json", "curriculum.safetensors", "learner.json", "learner.safetensors",
    ]  # fmt: skip
    state = load(found.path)
    assert state["learner"].values == {"step": 12}
    assert state["learner"].tensors["w"].tolist() == [12.0] * 4
    assert state["curriculum"] == State()


def test_the_manifest_lists_every_file_with_size_and_hash(tmp_path: Path):
    """And its format, so that a later version knows what it reads."""
    manifest = json.loads((saved(tmp_path, 1).directory / "step-1" / "manifest.json").read_text())

    assert manifest["format"] == "gnomon-checkpoint/2"
    assert manifest["step"] == 1
    assert set(manifest["files"]) == {
        "config.json", "model.safetensors", "state/curriculum.json", "state/curriculum.safetensors",
        "state/learner.json", "state/learner.safetensors",
    }  # fmt: skip
    # sha256 of "{}"
    empty_object = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert manifest["files"]["config.json"] == {"bytes": 2, "sha256": empty_object}


def test_a_large_file_has_a_faster_hash_that_sees_every_bit(tmp_path: Path):
    """Beyond 1 MiB it is XXH3, and any flipped bit is seen; what was written with SHA-256 alone is still read."""
    folder = tmp_path / "step-3"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4097)
    (folder / "config.json").write_bytes(b"{}")
    write_manifest(folder, 3)
    manifest = folder / "manifest.json"
    body = json.loads(manifest.read_text())
    assert set(body["files"]["model.safetensors"]) == {"bytes", "xxh3_128"}
    assert find_damage(folder) is None
    earlier = {"format": "gnomon-checkpoint/1", "step": 3, "files": {}}
    for path in (folder / "config.json", folder / "model.safetensors"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        earlier["files"][path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    own = hashlib.sha256(json.dumps(earlier, sort_keys=True).encode()).hexdigest()
    for content in (manifest.read_text(), json.dumps({**earlier, "sha256": own}, indent=2, sort_keys=True) + "\n"):
        manifest.write_text(content)
        assert find_damage(folder) is None
        for bit in (0, 8 * 500_000 + 3, 8 * 256 * 4097 - 1):
            flip(folder / "model.safetensors", bit)
            assert "is not what was written" in str(find_damage(folder))
            flip(folder / "model.safetensors", bit)


def test_no_checkpoint_is_no_error(tmp_path: Path):
    """A run that was killed before its first checkpoint, or in the middle of it, starts at the beginning."""
    (tmp_path / "checkpoints" / ".tmp-5-abcd").mkdir(parents=True)

    assert Checkpoints(tmp_path / "checkpoints").newest() is None
    assert Checkpoints(tmp_path / "nothing").newest() is None


def mutate(folder: Path, draw: Callable[[st.SearchStrategy[int]], int]) -> str:
    """Damage one thing in a checkpoint, and return what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, other = files[draw(st.integers(0, 6))], files[draw(st.integers(0, 6))]
    size = path.stat().st_size
    kind = draw(st.integers(0, 7))
    if kind <= 2:
        flip(path, draw(st.integers(0, 8 * size - 1)))
    elif kind == 3:
        os.truncate(path, draw(st.integers(0, size - 1)))
    elif kind == 4:
        path.write_bytes(path.read_bytes() + b"\0")
    elif kind == 5:
        path.unlink()
    elif kind == 6:
        (folder / "state" / "extra.json").write_text("{}")
    elif path.read_bytes() == other.read_bytes():
        path.rename(path.with_name("renamed"))
    else:
        swapped = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(swapped)
    return f"kind {kind} on {path.name} and {other.name}"


@given(st.data())
@settings(max_examples=300)
def test_any_damage_is_noticed(tmp_path_factory: pytest.TempPathFactory, sound: Path, data: st.DataObject):
    """Flipped bits, cut, grown, missing, added and swapped files, the manifest included: 300 of 300 are refused."""
    folder = tmp_path_factory.mktemp("damaged") / "step-5"
    shutil.copytree(sound, folder)
    done = mutate(folder, data.draw)

    assert find_damage(folder), done
    with pytest.raises(CheckpointError, match="is damaged"):
        load(folder)


def test_links_and_renamed_checkpoints_are_noticed(tmp_path: Path, sound: Path):
    """A file that points elsewhere can change without notice, and step 5 is not step 6."""
    shutil.copytree(sound, tmp_path / "step-5")
    shutil.copytree(sound, tmp_path / "step-6")
    shutil.copytree(sound, tmp_path / "a" / "step-5")
    (tmp_path / "step-5" / "config.json").unlink()
    (tmp_path / "step-5" / "config.json").symlink_to(sound / "config.json")
    (tmp_path / "a" / "step-5" / "more").symlink_to(tmp_path)

    assert find_damage(tmp_path / "step-5") == "config.json is no plain file"
    assert find_damage(tmp_path / "step-6") == "it is of step 5"
    assert find_damage(tmp_path / "a" / "step-5") == "more does not belong to it"
    assert find_damage(sound) is None


def test_a_damaged_newest_falls_back_loudly(tmp_path: Path):
    """Of 1, 2, 3 with 2 cut short and 3 flipped, 1 is used, and each damaged one has its line."""
    checkpoints = saved(tmp_path, 1, 2, 3)
    (tmp_path / "step-2" / "state" / "learner.json").unlink()
    flip(tmp_path / "step-3" / "model.safetensors", 800)
    found = checkpoints.newest()

    assert found is not None
    assert found.step == 1
    assert [line.rpartition(": ")[2] for line in found.warnings] == [
        "model.safetensors is not what was written (its SHA-256 differs)",
        "state/learner.json is missing",
    ]


def test_only_damaged_checkpoints_are_an_error_and_not_a_fresh_start(tmp_path: Path):
    """The message names each, and what to do."""
    checkpoints = saved(tmp_path, 1, 2)
    (tmp_path / "step-1" / "manifest.json").unlink()
    os.truncate(tmp_path / "step-2" / "model.safetensors", 10)

    with pytest.raises(CheckpointError, match=r"(?s)can be trusted.*step-2 .*has 10 bytes.*step-1 .*manifest.json is"):
        checkpoints.newest()


def test_the_newest_is_found_beside_a_run_that_publishes_and_removes(tmp_path: Path):
    """A checkpoint that its run removed while it was compared is not damaged: the next newest is the answer."""
    writer, is_over, steps = saved(tmp_path, 1, keep_last=1), threading.Event(), set[int]()

    def publish() -> None:
        step = 1
        while not is_over.is_set():
            writer.save(step := step + 1, parts(step), model_files)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        while len(steps) < 20:
            found = Checkpoints(tmp_path).newest()
            assert found is not None
            assert found.warnings == ()
            steps.add(found.step)
    finally:
        is_over.set()
        thread.join()


def test_an_existing_checkpoint_is_never_written_into(tmp_path: Path):
    """A sound one is refused; a damaged one is set aside, not removed, and its step can be saved again."""
    said: list[str] = []
    saved(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, warn=said.append)
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoints.save(1, parts(1), model_files)
    flip(tmp_path / "step-1" / "model.safetensors", 800)
    checkpoints.save(1, parts(1), model_files)

    assert find_damage(tmp_path / "step-1") is None
    assert [name.rpartition("-")[0] for name in names(tmp_path)] == ["damaged-step-1", "step"]
    assert "was set aside" in said[0]


def test_retention_keeps_the_last_the_milestones_and_the_best(tmp_path: Path):
    """Of 1 to 7 with the last two, every third, and 1 as the best: 1, 3, 6, 7."""
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=3)
    for step in range(1, 8):
        checkpoints.save(step, parts(step), model_files, is_best=step == 1)

    assert names(tmp_path) == ["best.json", "step-1", "step-3", "step-6", "step-7"]
    assert checkpoints.best() == tmp_path / "step-1"


def test_a_better_checkpoint_lets_the_former_best_go(tmp_path: Path):
    """The best mark moves, and retention follows."""
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for step, is_best in [(1, True), (2, False), (3, True), (4, False)]:
        checkpoints.save(step, parts(step), model_files, is_best)

    assert names(tmp_path) == ["best.json", "step-3", "step-4"]
    assert Checkpoints(tmp_path / "none").best() is None


def test_retention_never_removes_the_last_sound_one_for_a_damaged_one(tmp_path: Path):
    """Keeping two of 1, 2 (cut short), 3: the damaged one does not count, so 1 stays."""
    checkpoints = saved(tmp_path, 1, 2, keep_last=2)
    (tmp_path / "step-2" / "model.safetensors").unlink()
    checkpoints.save(3, parts(3), model_files)

    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


def write_to_a_full_disk(folder: Path) -> None:
    model_files(folder)
    with open("/dev/full", "wb") as full:
        full.write(b"\0")


def fail_like_safetensors(folder: Path) -> None:
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("writer", [write_to_a_full_disk, fail_like_safetensors])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, writer: Callable[[Path], None]):
    """ENOSPC in the middle of a save: an OSError that says so, the previous one loads, and no torn folder is left."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(OSError, match="no space for the checkpoint of step 2") as raised:
        checkpoints.save(2, parts(2), writer)

    found = checkpoints.newest()
    assert raised.value.errno == errno.ENOSPC
    assert found is not None
    assert found.step == 1
    assert names(tmp_path) == ["step-1"]


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkpoint of 1,000 float64 needs 1.1 * 8,000 bytes and more; the message has the exact numbers."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000))
    big = {"learner": State({"w": torch.zeros(1_000, dtype=torch.float64)})}

    with pytest.raises(OSError, match="needs 8800 bytes, and 5000 are free; make room for 3800 more") as raised:
        Checkpoints(tmp_path).save(1, big, model_files)
    assert raised.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_an_error_while_saving_is_passed_on_and_nothing_is_left(tmp_path: Path):
    """Whatever a writer raises comes out as it is."""

    def fail(folder: Path) -> None:
        raise KeyError("weight")

    with pytest.raises(KeyError, match="weight"):
        Checkpoints(tmp_path).save(1, parts(1), fail)
    assert names(tmp_path) == []


KILLED = """
import os, sys
from pathlib import Path
import torch
from gnomon.records import checkpoints, manifest
from gnomon.core.types import State

where, directory = sys.argv[1], Path(sys.argv[2])
kept = checkpoints.Checkpoints(directory, keep_last=1)
state = {"learner": State({"w": torch.ones(4)})}
files = lambda folder: (folder / "config.json").write_text("{}")
die = lambda *given, **named: os._exit(9)
kept.save(1, state, files)
if where == "manifest":
    checkpoints.write_manifest = die
elif where == "rename":
    os.rename = die
elif where == "sync after rename":
    checkpoints.sync_directory = die
elif where == "removal":
    checkpoints.shutil.rmtree = lambda path, **named: None
kept.save(2, state, die if where == "model" else files)
os._exit(9)
"""


@pytest.mark.parametrize(
    ("where", "step"), [("model", 1), ("manifest", 1), ("rename", 1), ("sync after rename", 2), ("removal", 2)]
)
def test_killed_anywhere_in_a_save_there_is_a_sound_checkpoint(tmp_path: Path, where: str, step: int):
    """Before the rename it is the former one, after it the new one; leftovers go when the next run sweeps."""
    killed = subprocess.run([sys.executable, "-c", KILLED, where, str(tmp_path)], cwd=SOURCE, check=False)
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    found = checkpoints.newest()
    checkpoints.remove_unfinished()

    assert killed.returncode == 9
    assert found is not None
    assert (found.step, found.warnings) == (step, ())
    assert all(name.startswith("step-") for name in names(tmp_path))


def test_a_manifest_that_is_no_plain_file_is_damage(tmp_path: Path):
    """A pipe would be waited for, and a device read without end."""
    folder = saved(tmp_path, 1).directory / "step-1"
    manifest = folder / "manifest.json"
    whole = manifest.read_bytes()
    manifest.unlink()
    os.mkfifo(manifest)
    assert "no plain file" in str(find_damage(folder))
    manifest.unlink()
    manifest.symlink_to("/dev/zero")
    assert "no plain file" in str(find_damage(folder))
    manifest.unlink()
    manifest.write_bytes(whole)
    assert find_damage(folder) is None


def test_a_dangling_link_in_the_way_is_set_aside(tmp_path: Path):
    """It has the name that a checkpoint is to get."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-1").symlink_to(tmp_path / "nowhere")
    saved(folder, 1)

    assert find_damage(folder / "step-1") is None
    assert len([path for path in folder.iterdir() if path.name.startswith("damaged-step-1-")]) == 1


def test_what_an_interrupted_save_left_is_removed_even_if_it_is_a_link(tmp_path: Path):
    """The link goes, and nothing that it leads to."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    (folder / ".tmp-1-abcd").symlink_to(elsewhere)
    Checkpoints(folder).remove_unfinished()

    assert list(folder.iterdir()) == []
    assert (elsewhere / "file").read_text() == "mine"


def test_what_a_killed_removal_leaves_is_never_read_and_is_swept(tmp_path: Path):
    """A checkpoint that was renamed in order to be removed is whole, and yet neither newest nor best."""
    checkpoints = saved(tmp_path, 1)
    (newest,) = checkpoints.directory.glob("step-*")
    newest.rename(newest.with_name(".removed-1-abcd"))

    assert checkpoints.newest() is None
    assert checkpoints.best() is None
    checkpoints.remove_unfinished()
    assert not list(checkpoints.directory.glob(".removed-*"))


def test_a_disk_that_fails_is_told_with_the_step_and_the_folder(tmp_path: Path):
    """An error of ours, not a bare number of the system's; what was there stays, and nothing is left of the new one."""
    checkpoints = saved(tmp_path, 1)

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(folder / "model.safetensors"))

    with pytest.raises(CheckpointError, match=r"the checkpoint of step 2 in .* cannot be written: .*Input/output"):
        checkpoints.save(2, {"learner": State()}, fail)
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-1"]


def test_the_first_checkpoint_asks_for_room_for_the_model_too(tmp_path: Path):
    """Before anything is written; there is no earlier one to judge by."""
    wanted = shutil.disk_usage(tmp_path).total * 2

    with pytest.raises(OSError, match="are free; make room for") as raised:
        Checkpoints(tmp_path / "c").save(1, {"learner": State()}, lambda folder: None, model_bytes=wanted)
    assert raised.value.errno == errno.ENOSPC
