"""Tasksets of the verifiers package from 0.4, where it is installed (`make test-full`): its harnesses, our address."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.rollouts.test_agent import Parrot, played, say, task_of

from gnomon.core.errors import ConfigError
from gnomon.tasks.env_server import EnvServer
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.verifiers_agent import write_questions

MINE = '''
import httpx
import verifiers.v1 as vf

__all__ = ["Loop", "Words"]


class Say(vf.TaskData):
    answer: str = ""


class SayTask(vf.Task[Say]):
    @vf.reward(weight=2.0)
    async def said(self, trace):
        return float(self.data.answer in trace.last_reply)

    @vf.reward
    async def long(self, trace):
        return 0.25 * trace.num_turns


class Words(vf.Taskset[SayTask]):
    def load(self):
        for n in range(4):
            yield SayTask(Say(prompt=f"say {n}", answer=str(n)), self.config.task)


class Loop(vf.Harness[vf.HarnessConfig]):
    """Asks twice, in this process; the package says that a harness may."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        said = data.prompt if isinstance(data.prompt, str) else data.prompt[-1].content
        messages = [{"role": "user", "content": said}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.status_code != 200:
                    break
                messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
'''


def planned(**given: Any) -> EnvironmentConfig:
    """An environment of the taskset."""
    return EnvironmentConfig(**{"kind": "verifiers", "use": "gnomon_words", "max_reply_tokens": 2000, **given})


@pytest.fixture(autouse=True)
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A taskset that the package finds."""
    pytest.importorskip("verifiers.v1", reason="pip install verifiers==0.4.0")
    (tmp_path / "gnomon_words.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_harness_calls_the_policy_and_the_rubric_pays():
    """Rewards are the task's, weighted and summed: right twice is 2.5, wrong 0.5; a row's index says which task."""
    right, wrong = played(planned(), [task_of("a", index=2), task_of("b", index=3)], Parrot([say("it is 2")]))

    assert [each.grade.reward for each in (right, wrong)] == [2.5, 0.5]
    assert (right.ending.by, right.ending.turns, right.segments) == ("done", 2, ())
    assert "say 2" in bytes(t for t in right.prompt if t < 256).decode()


def test_turns_bound_an_agent_that_goes_on():
    """The rollout's turns are the role's, so that what was said by then is scored."""
    [cut] = played(planned(max_turns=1), [task_of("a", index=2)], Parrot([say("it is 2")]))

    assert (cut.grade.reward, cut.ending.turns, cut.ending.by) == (2.25, 1, "done")


def test_an_environment_that_ships_plays_the_taskset():
    """best-of-n attempts it twice: two conversations of one rollout, whose reward is their mean."""
    settings = {"id": "best-of-n", "n": 2}
    [both] = played(planned(settings=settings), [task_of("a", index=1)], Parrot([say("0"), say("1")]))

    assert both.grade.reward == 2.5
    assert len(both.segments) == 1


def test_a_resource_server_of_nemo_gym_pays(tmp_path: Path):
    """The taskset that the package ships seeds a session of a server, and has it verify what the policy said."""
    asked: list[str] = []

    class Gym(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(self.path)
            if self.path == "/verify":
                texts = [part["text"] for item in body["response"]["output"] for part in item["content"]]
                body["reward"] = float(body["expected"] in texts[-1])
            said = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gym)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = [
        {"responses_create_params": {"input": [{"role": "user", "content": f"say {n}"}]}, "expected": str(n)}
        for n in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "taskset": {
            "dataset": str(tmp_path / "rows.jsonl"),
            "task": {"resources_url": f"http://127.0.0.1:{server.server_port}"},
        },
        "agent": {"harness": {"id": "gnomon_words"}},
    }
    rollouts = played(
        planned(use="nemo-gym", settings=settings, timeout_seconds=200.0),
        [task_of(index=1), task_of(index=2)],
        Parrot([say("1")]),
    )
    server.shutdown()
    server.server_close()

    assert [(rollout.grade.reward, rollout.grade.error) for rollout in rollouts] == [(1.0, None), (0.0, None)]
    assert sorted(asked) == ["/seed_session"] * 2 + ["/verify"] * 2


def test_what_cannot_be_meant_is_refused_before_a_run():
    """Unknown names, a role that nobody trains, programs that nothing says where to run; and a row without a task."""
    for settings, use, why in (
        ({}, "gnomon_none", "verifiers cannot load 'gnomon_none'"),
        ({"agent": {"harness": {"id": "bash"}}}, "gnomon_words", "harness 'bash' of the role 'agent' runs programs"),
        ({"id": "user-sim", "user": {"harness": {"id": "gnomon_words"}}}, "gnomon_words", "not train its role 'user'"),
        ({"agent": {"turns": 3}}, "gnomon_words", "turns"),
    ):
        with pytest.raises(ConfigError, match=why):
            EnvServer(planned(use=use, settings=settings)).prepare()
    [lost] = played(planned(), [task_of("a", index=9)])
    assert "index = 9 is no task" in str(lost.grade.error)


def test_its_questions_are_written_down(tmp_path: Path):
    """One JSON object a line: what a task begins with, and its number."""
    assert write_questions("gnomon_words", tmp_path / "q.jsonl", 3) == 3
    assert json.loads((tmp_path / "q.jsonl").read_text().splitlines()[2]) == {"prompt": "say 2", "index": 2}
