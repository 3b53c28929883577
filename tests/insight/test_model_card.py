"""A run's model on the hub: what is sent to a server that speaks the hub's interface, and what is refused before."""

import base64
import hashlib
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml
from huggingface_hub import constants
from safetensors.torch import load
from tests.random_model import RANDOM

import gnomon
from gnomon.cli.main import main
from gnomon.insight.model_card import model_card, shared_experiment
from gnomon.records.reading import RunRecord

# The hub's library sends a file by a parameter that httpx is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
Capture = pytest.CaptureFixture[str]


class Hub(ThreadingHTTPServer):
    """A server with one user, "me", that keeps repositories in memory, and large files by their digest."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.role, self.breaks_at = "write", ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        status, said = self.answer(path, body)
        if self.server.breaks_at and self.server.breaks_at in path:
            status, said = 500, {"error": "out of order"}
        content = json.dumps(said).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = handle_any

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        hub = self.server
        if path.startswith("/large/"):
            hub.large[path.removeprefix("/large/")] = body
            return 200, {}
        if self.headers.get("Authorization") != "Bearer hf_right":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "auth": {"accessToken": {"role": hub.role}}}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        given = json.loads(body) if body.startswith(b"{") and not path.endswith("/commit/main") else {}
        if path == "/api/repos/create":
            name = f"{given['organization']}/{given['name']}"
            hub.private.setdefault(name, given.get("private", given.get("visibility") == "private"))
            hub.repositories.setdefault(name, {})
            return 200, {"url": f"{hub.url}/{name}"}
        (name,) = re.findall(r"^(?:/api/models)?/(\w+/[\w-]+)", path)
        if name not in hub.repositories:
            return 404, {"error": "Repository not found"}
        if path.endswith("/preupload/main"):
            modes = {True: "lfs", False: "regular"}
            mode = {f["path"]: modes[f["path"].endswith(".safetensors")] for f in given["files"]}
            return 200, {"files": [{"path": p, "shouldIgnore": False, "uploadMode": m} for p, m in mode.items()]}
        if path.endswith("/info/lfs/objects/batch"):
            put = [{**o, "actions": {"upload": {"href": f"{hub.url}/large/{o['oid']}"}}} for o in given["objects"]]
            return 200, {"transfer": "basic", "objects": put}
        if "/tree/" in path:
            return 200, [{"type": "file", "path": p, "size": 1, "oid": "0"} for p in hub.repositories[name]]
        if path.endswith("/commit/main"):
            self.commit(name, body)
            return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{hub.url}/{name}/commit/1"}
        return 200, {"id": name, "private": hub.private[name], "sha": "1" * 40, "siblings": []}

    def commit(self, name: str, body: bytes) -> None:
        files = self.server.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
                assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
            if line["key"] == "deletedFile":
                del files[value["path"]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of this machine, to which the hub's own library goes as it goes to the other; with a token that may."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, evaluated before and after."""
    folder = tmp_path_factory.mktemp("card") / "run"
    gnomon.train(RANDOM, folder, steps=2, rollouts_per_step=64)
    return folder


def header(text: str) -> dict[str, Any]:
    """Return the metadata of a card as the hub reads them."""
    values = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(values, dict)
    return values


def test_an_upload_is_the_model_its_card_and_its_experiment(run: Path, hub: Hub, capsys: Capture):
    """The repository is private and holds the checkpoint's weights bit for bit; what was there of a model is gone."""
    hub.repositories["me/adds"] = {"model-00001-of-00002.safetensors": b"former", "picture.png": b"kept"}
    hub.private["me/adds"] = True
    assert main(["export", str(run), "--to", "hub:me/adds", "--json"]) == 0
    said, files = json.loads(capsys.readouterr().out), hub.repositories["me/adds"]
    weights = (run / "checkpoints" / "step-2" / "model.safetensors").read_bytes()

    assert said["url"] == f"{hub.url}/me/adds"
    assert files["model.safetensors"] == weights
    assert load(files["model.safetensors"])
    assert {*said["files"], "picture.png"} == set(files)
    assert header(files["README.md"].decode())["tags"] == ["gnomon", "reinforcement-learning", "grpo"]


@pytest.mark.parametrize(("options", "is_private"), [([], True), (["--public"], False)])
def test_a_new_repository_is_private_unless_said(
    options: list[str], is_private: bool, run: Path, hub: Hub, capsys: Capture
):
    """Nobody publishes by mistake; --public does, and the last line says which."""
    assert main(["export", str(run), "--to", "hub:me/new", *options]) == 0
    assert hub.private == {"me/new": is_private}
    assert capsys.readouterr().out.strip().endswith("(private)" if is_private else "(public)")


def test_a_dry_run_asks_nobody(run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """It writes the folder that would be uploaded, without a token; the experiment in it is one that gnomon reads."""
    monkeypatch.delenv("HF_TOKEN")
    assert main(["export", str(run), str(tmp_path / "out"), "--to", "hub:me/adds", "--dry-run"]) == 0
    assert hub.asked == []
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert main(["plan", str(tmp_path / "out" / "experiment.toml")]) == 0


@pytest.mark.parametrize(
    ("prepare", "arguments", "said"),
    [
        ({}, ["--to", "hub:adds"], "'adds' does not say whose repository it is; write hub:USER/adds"),
        ({}, ["--to", "hub:me/a--b/c"], "'me/a--b/c' is no repository of the hub"),
        ({}, ["--to", "hub:me/adds", "--dry-run"], "writes what would be uploaded into a folder; name a new one"),
        ({}, ["--to", "hup:me/adds"], "--to is hub:USER/NAME or gguf, got 'hup:me/adds'"),
        ({"token": ""}, ["--to", "hub:me/adds"], "needs a token of the hub; run `hf auth login`, or set HF_TOKEN"),
        ({"token": "hf_wrong"}, ["--to", "hub:me/adds"], "does not take the token"),
        ({"role": "read"}, ["--to", "hub:me/adds"], "the token of me may only read"),
        ({"offline": True}, ["--to", "hub:me/adds"], "HF_HUB_OFFLINE forbids an upload to me/adds"),
        ({"public": True}, ["--to", "hub:me/adds"], "me/adds exists and is public; say so with --public"),
        ({"public": False}, ["--to", "hub:me/adds", "--public"], "exists and is private; leave --public out"),
    ],
)
def test_what_the_hub_would_refuse_is_refused_first(
    prepare: dict[str, Any], arguments: list[str], said: str, run: Path, hub: Hub, monkeypatch: Any, capsys: Capture
):
    """Exit code 2 with what to type, before anything is copied or sent."""
    monkeypatch.setenv("HF_TOKEN", prepare.get("token", "hf_right"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(run / "none"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", prepare.get("offline", False))
    hub.role = prepare.get("role", "write")
    if "public" in prepare:
        hub.repositories["me/adds"], hub.private["me/adds"] = {}, not prepare["public"]

    assert main(["export", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not any(line.startswith("POST") for line in hub.asked)


def test_an_upload_that_breaks_is_a_failed_run_and_leaves_no_folder(
    run: Path, hub: Hub, tmp_path: Path, capsys: Capture
):
    """Exit code 1, the cause in one line; nothing half is left in the folder that was to keep it."""
    hub.breaks_at = "/commit/"
    assert main(["export", str(run), str(tmp_path / "out"), "--to", "hub:me/adds"]) == 1
    assert "the upload to me/adds failed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_card_says_what_its_run_measured(run: Path):
    """Scores of the first and last evaluation, the last values of the curves and the settings are those of the run."""
    record = RunRecord(run)
    text = model_card(record, "me/adds", 2)
    first, last = record.evaluations()
    row = record.metrics()[-1]
    (result,) = header(text)["model-index"][0]["results"]

    assert f"| answer | {first['scores']['answer']['mean']:.3f} [" in text
    assert result["metrics"][0] == {"type": "answer", "value": round(last["scores"]["answer"]["mean"], 4)}
    assert f"| {row['rollout/reward_mean']:.4g} | Mean reward" in text
    assert "| steps | 2 of 2 |" in text
    assert "`tiny` after 2 steps of reinforcement learning with grpo" in text
    assert "base_model" not in header(text)


def test_a_card_says_how_prompts_were_written(run: Path, tmp_path: Path):
    """Whoever asks the model otherwise asks another policy: its system message, and variables of its template."""
    table = tomllib.loads((run / "experiment.toml").read_text())
    table |= {"system": "Be brief | please.", "chat_template_kwargs": {"enable_thinking": False}}
    (there := tmp_path / "run").mkdir()
    (there / "experiment.toml").write_text(tomli_w.dumps(table))
    text = model_card(RunRecord(there), "me/adds", 2)

    assert '| system message | "Be brief \\| please." |' in text
    assert '| chat template | {"enable_thinking": false} |' in text
    assert "system message" not in model_card(RunRecord(run), "me/adds", 2)


def test_a_card_of_a_run_on_the_datasets_answers_says_so(tmp_path: Path):
    """Supervised fine-tuning is not called reinforcement learning, in the text and among the tags."""
    given = ["sft", RANDOM, "steps=2", "rollouts_per_step=8", "held_out.size=2", "evaluation.samples=0"]
    assert main([*given, "--run-dir", str(tmp_path / "run")]) == 0
    text = model_card(RunRecord(tmp_path / "run"), "me/adds", 2)

    assert "`tiny` after 2 steps of supervised fine-tuning with sft" in text
    assert header(text)["tags"] == ["gnomon", "supervised-fine-tuning", "sft"]


def test_a_card_of_a_reward_model_says_that_it_scores(tmp_path: Path, capsys: Capture):
    """No text is generated by it: the card, its tags, its use, and the commands that the run prints."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f'{{"prompt": "{n}+1=", "chosen": "{n + 1}", "rejected": "99"}}\n' for n in range(12)))
    given = ["reward-model", RANDOM, f"task={pairs}", "steps=1", "held_out.size=2"]
    assert main([*given, "--run-dir", str(tmp_path / "run")]) == 2
    assert "set rollouts_per_step = 20 or less" in capsys.readouterr().err
    assert main([*given, "rollouts_per_step=20", "--run-dir", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hub:me/judge", "--dry-run"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()

    assert "--samples" not in said
    assert "reward modeling with reward-model" in text
    assert header(text)["pipeline_tag"] == "text-classification"
    assert header(text)["tags"] == ["gnomon", "reward-modeling", "reward-model"]
    assert "text-generation" not in text
    assert 'model = "me/judge"' in text
    assert "AutoModelForSequenceClassification" in text


def test_a_card_of_an_earlier_step_has_nothing_of_a_later_one(run: Path):
    """A checkpoint of step 1 has the evaluation before training alone, and step 1's metrics."""
    text = model_card(RunRecord(run), "me/adds", 1)

    assert "after step 2" not in text
    assert "| metric | step 1 | step 1 |" in text


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (('model = "tiny"', 'model = "smollm2-135m-instruct"'), ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")),
        (('model = "tiny"', 'model = "Qwen/Qwen3-0.6B"'), ("Qwen/Qwen3-0.6B", None)),
        (('model = "tiny"', 'model = "BASE"'), (None, "mit")),
    ],
)
def test_base_model_and_license_where_they_are_known(
    changed: tuple[str, str], expected: tuple[str | None, str | None], run: Path, tmp_path: Path
):
    """The hub links a model to the one that it came from; a license is what the base model's own card says."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    text = (run / "experiment.toml").read_text().replace(*changed).replace("BASE", str(tmp_path / "base"))
    (tmp_path / "experiment.toml").write_text(text)
    found = header(model_card(RunRecord(tmp_path), "me/adds", 0))

    assert (found.get("base_model"), found.get("license")) == expected


def test_folders_of_the_machine_do_not_leave_it():
    """Of an absolute path the name is left, wherever it stands; other texts are as they were."""
    table = {"model": "/data/base", "rewards": [{"function": "/data/own.py:brevity"}], "name": "a/b"}

    read = tomllib.loads(shared_experiment(table))
    assert read == {"model": "base", "rewards": [{"function": "own.py:brevity"}], "name": "a/b"}
