"""A judge behind an endpoint: what it is asked, what counts as its vote, and what is kept of it."""

import asyncio
import contextlib
import json
import math
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import gnomon
from gnomon.core.errors import ConfigError, RewardError
from gnomon.records.ownership import named_code
from gnomon.rewards.base import Sample
from gnomon.rewards.exact import Numeric
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.judge import RubricJudge
from gnomon.rewards.judge_client import JudgeCache, JudgeClient

INJECTIONS = tomllib.loads((Path(__file__).parent / "judge_injections.toml").read_text())["texts"]
CRITERIA = ("The answer is right.", "The answer is short.")
Reply = Callable[[dict[str, Any], int], tuple[int, Any]]


class Endpoint:
    """A server that speaks as OpenAI's does, and what it was asked."""

    def __init__(self, url: str) -> None:
        self.url, self.asked, self.keys = url, [], []


def said(grades: Any, usage: tuple[int, int] | None = (100, 10)) -> tuple[int, Any]:
    text = grades if isinstance(grades, str) else json.dumps({"grades": grades})
    counted = None if usage is None else {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": counted}


@contextmanager
def endpoint(reply: Reply) -> Iterator[Endpoint]:
    """Serve ``reply`` of a request's body and its number."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                found.asked.append(body)
                found.keys.append(self.headers.get("Authorization"))
                status, answer = reply(body, len(found.asked) - 1)
            text = answer if isinstance(answer, bytes) else json.dumps(answer, default=str).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"{found.url}/elsewhere")
            if status == 429:
                self.send_header("Retry-After", str(answer.get("wait", 0)))
            if callable(answer):
                self.end_headers()
                answer(self.wfile)
                return
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Endpoint(f"http://127.0.0.1:{server.server_port}/v1")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def judge(at: Endpoint, **changes: Any) -> RubricJudge:
    return RubricJudge(**{"url": at.url, "judge": "m", "criteria": CRITERIA, "pause_seconds": 0.0, **changes})


def asked(settings: RubricJudge, *answers: str, cache: JudgeCache | None = None) -> list[Any]:
    return JudgeClient(settings, cache or JudgeCache())([Sample("1 + 1 =", answer) for answer in answers])


def test_the_score_is_the_weighted_mean_of_grades_and_votes():
    """Votes (3 * 1.0 + 1 * 0.5) / 4 = 0.875 and (3 * 0.8 + 1 * 1.0) / 4 = 0.85: their mean, 1 - 0.025, tokens, cost."""
    with endpoint(lambda _, n: said([[10, 5], [8, 10]][n])) as at:
        (found,) = asked(judge(at, criterion_weights=(3.0, 1.0), votes=2, concurrency=1, input_price=2.0), "2")

    assert found == pytest.approx({"": 0.8625, "_agreement": 0.975, "_tokens": 220.0, "_cost": 0.0004})


def test_votes_that_differ_too_much_are_an_error():
    """Votes of 1.0 and 0.2 with a bound of 0.5: the message has both."""
    with endpoint(lambda _, n: said([[10, 10], [2, 2]][n])) as at:
        (found,) = asked(judge(at, votes=2, concurrency=1), "2")

    assert found == "the judge's votes are 1.00, 0.20: they differ by 0.80, more than max_disagreement = 0.5"


def test_a_group_is_graded_side_by_side_in_balanced_orders():
    """A judge by content ranks alike in all orders; one by position alone gives all answers the same mean, 0.5."""

    def answers(body: dict[str, Any]) -> list[str]:
        return list(json.loads(body["messages"][1]["content"].splitlines()[1])["answers"].values())

    with endpoint(lambda body, _: said(json.dumps({"grades": [[int(a), 10] for a in answers(body)]}))) as at:
        found = asked(judge(at, over="group", votes=4, criterion_weights=(3.0, 1.0)), "2", "10", "2", "0")
        assert [each[""] for each in found] == pytest.approx([0.4, 1.0, 0.4, 0.25])
        assert [each["_agreement"] for each in found] == [1.0] * 4
        assert sorted(map(answers, at.asked)) == sorted(
            [["2", "10", "0"], ["0", "10", "2"], ["10", "0", "2"], ["2", "0", "10"]]
        )
        assert sum(each["_tokens"] for each in found) == 4 * 110.0
    with endpoint(lambda body, _: said(json.dumps({"grades": [[10 - 5 * n, 10 - 5 * n] for n in range(3)]}))) as at:
        found = asked(judge(at, over="group", votes=2, max_disagreement=1.0), "a", "b", "c")
        assert [each[""] for each in found] == [0.5] * 3
        first, middle, last = asked(judge(at, over="group", votes=2), "a", "b", "c")
        assert first == "the judge's votes are 1.00, 0.00: they differ by 1.00, more than max_disagreement = 0.5"
        assert last == first.replace("1.00, 0.00", "0.00, 1.00")
        assert middle[""] == 0.5


@pytest.mark.parametrize("grades", [[[1, 1]], [[1, 1], [1]], [1, 1], [[1, 1], [1, 11]], [[1, 1], [1, 1], [1, 1]], {}])
def test_grades_of_a_group_are_a_list_for_each_answer(grades: Any):
    """Anything else is asked for again, and after all attempts no answer of the group has a grade."""
    with endpoint(lambda *_: said(json.dumps({"grades": grades}))) as at:
        found = asked(judge(at, over="group", votes=2, attempts=2), "2", "3")

    assert len(at.asked) >= 2
    assert len(set(found)) == 1
    assert "2 lists of 2 numbers from 0 to 10 were asked for" in found[0]


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("votes", [2, 4, 6, 16])
def test_every_answer_stands_in_the_middle_on_average(count: int, votes: int):
    """Over the votes the mean position of each answer is (count - 1) / 2."""
    settings = RubricJudge("http://localhost/v1", "m", CRITERIA, over="group", votes=votes)
    places = [[settings.order(count, vote).index(answer) for vote in range(votes)] for answer in range(count)]

    assert {sum(each) / votes for each in places} == {(count - 1) / 2}


@pytest.mark.parametrize("text", [each["text"] for each in INJECTIONS], ids=[each["name"] for each in INJECTIONS])
def test_a_judged_text_cannot_end_its_quotation(text: str):
    """What is sent is three lines: the mark, one object that gives the text back, the mark; the rules do not change."""
    settings = RubricJudge("http://localhost/v1", "m", CRITERIA)
    system, user = settings.messages(Sample(text, text))
    plain_system, plain_user = settings.messages(Sample("1 + 1 =", "2"))
    said = ({"role": "user", "content": text},)
    _, chat = settings.messages(Sample("", "", columns={"conversation": list(said)}, messages=said))

    first, line, last = user["content"].split("\n")
    assert user["content"].splitlines() == [first, line, last]
    assert first == last
    assert first not in text
    assert json.loads(line) == {"question": text, "answer": text}
    assert json.loads(chat["content"].splitlines()[1]) == {"question": {"1": said[0]}, "answer": {"1": said[0]}}
    _, compared = replace(settings, over="group", votes=2).messages(Sample(text, text), Sample(text, "2"))
    assert json.loads(compared["content"].splitlines()[1]) == {"question": text, "answers": {"1": text, "2": "2"}}
    assert not set("<>[]|`") & set(line + chat["content"] + compared["content"])
    assert line.isascii()
    mark = plain_user["content"].split("\n")[0]
    assert system["content"].replace(first, mark) == plain_system["content"]


@pytest.mark.parametrize(
    "reply",
    [
        'The answer says {"grades": [10, 10]}.', '{"grades": [10]}', '{"grades": [10, 11]}', '{"grades": [true, 10]}',
        '{"grades": "10"}', '{"grades": [NaN, 1]}', "[10, 10]", "",
    ],
)  # fmt: skip
def test_a_reply_that_is_not_what_was_asked_for_is_asked_again(reply: str):
    """It is no vote; the next reply is one, and after all attempts the answer has an error, never a zero."""
    with endpoint(lambda _, n: said(reply if n == 0 else '```json\n{"grades": [10, 0]}\n```')) as at:
        (found,) = asked(judge(at), "2")
        assert found[""] == 0.5
        assert len(at.asked) == 2
    with endpoint(lambda *_: said(reply)) as at:
        (found,) = asked(judge(at, attempts=3), "2")
        assert len(at.asked) == 3
    assert found.startswith("the judge gave no grades in 3 of 3 attempts: the reply is not what was asked for")


def test_a_failing_endpoint_is_tried_as_often_as_allowed():
    """500, 429 and what is no JSON are tried again; 401 is final; a redirection is not followed."""
    with endpoint(lambda _, n: [(500, {}), (429, {}), (200, b"<html>"), said([10, 10])][n]) as at:
        assert asked(judge(at), "2")[0][""] == 1.0
    with endpoint(lambda *_: (401, {"error": "no"})) as at:
        assert "in 1 of 4 attempts: HTTP 401" in asked(judge(at), "2")[0]
        assert len(at.asked) == 1
    with endpoint(lambda *_: (302, {})) as at:
        assert "HTTP 302" in asked(judge(at), "2")[0]
        assert len(at.asked) == 1
    assert "in 2 of 2 attempts: URLError" in asked(judge(at, attempts=2), "2")[0]  # nobody listens there now


def test_an_endpoint_is_asked_again_when_it_says():
    """A rate limit's Retry-After is waited for, longer than the pause of the settings; the run's end ends the wait."""
    answered = threading.Event()

    def limited(*_: Any) -> tuple[int, Any]:
        answered.set()
        return 429, {"wait": 3600}

    with endpoint(limited) as at:
        client = JudgeClient(judge(at, timeout_seconds=3600.0), JudgeCache())
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(client, [Sample("1 + 1 =", "2")])
            answered.wait()
            client.close()
            assert found.result() == ["the run ended before the judge was asked"]
        assert len(at.asked) == 1


def test_a_reply_that_drips_is_given_up():
    """The time for a request is that of all of it: an endpoint that keeps a connection alive is no answer."""

    def drip(file: Any) -> None:
        with contextlib.suppress(OSError):  # until the client hangs up
            while True:
                file.write(b" ")
                time.sleep(0.01)

    with endpoint(lambda *_: (200, drip)) as at:
        (found,) = asked(judge(at, attempts=1, pause_seconds=1.0, timeout_seconds=0.1), "2")
    assert found.endswith("TimeoutError: no whole reply in 0.1 s")


def test_the_key_goes_to_the_endpoint_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It is sent as a bearer's, and stands in no record, even where the endpoint repeats it."""
    monkeypatch.setenv("JUDGES", "very-secret-0123")
    cache = tmp_path / "judge.jsonl"
    with endpoint(lambda *_: (403, {"you sent": "very-secret-0123"})) as at:
        (found,) = asked(judge(at, variable="JUDGES"), "2", cache=JudgeCache(cache))
    with endpoint(lambda *_: said([1, 1])) as again:
        asked(judge(again, variable="JUDGES"), "2", cache=JudgeCache(cache))

    assert at.keys == again.keys == ["Bearer very-secret-0123"]
    assert "very-secret" not in found + cache.read_text()
    monkeypatch.delenv("JUDGES")
    with pytest.raises(RewardError, match="environment variable JUDGES, which is not set"):
        JudgeClient(judge(again, variable="JUDGES"), JudgeCache())


def test_a_reply_that_is_no_json_is_shown_without_the_key(monkeypatch: pytest.MonkeyPatch):
    """As a page of a gateway's is, whose address lacks /v1; a key that lies across the cut is not shown in part."""
    monkeypatch.setenv("JUDGES", "very-secret-0123")
    for status, text in ((200, b"<html>" + b" " * 90 + b"very-secret-0123"), (400, b"x" * 292 + b"very-secret-0123")):
        with endpoint(lambda *_, reply=(status, text): reply) as at:
            (found,) = asked(judge(at, variable="JUDGES", attempts=2), "2")
        assert "the reply is no JSON: '<html>" in found or "HTTP 400: xxx" in found
        assert "very" not in found


def test_what_was_said_is_not_asked_again(tmp_path: Path):
    """Equal answers share their votes, in one call and in the next process; a torn last line is asked for again."""
    file = tmp_path / "judge.jsonl"
    with endpoint(lambda _, n: said([n % 10, n % 10])) as at:
        settings = judge(at, votes=2, max_disagreement=1.0)
        first = asked(settings, "2", "2", "3", cache=JudgeCache(file))
        assert len(at.asked) == 4
        assert first[0] == first[1]
        assert asked(settings, "2", "2", "3", cache=JudgeCache(file)) == first
        assert len(at.asked) == 4
        file.write_bytes(file.read_bytes()[:-5])
        again = asked(settings, "2", "2", "3", cache=JudgeCache(file))
        assert len(at.asked) == 5
        assert asked(settings, "2", "2", "3", cache=JudgeCache(file)) == again
        assert asked(judge(at, votes=2, temperature=0.5), "2", cache=JudgeCache(file))
        assert len(at.asked) == 7


@pytest.mark.parametrize(
    "forged",
    [
        b"garbage", b"\xff\xfe", b"7", b"null", b"[]", b"{}", b'{"request": []}', b"[" * 100_000,
        *({"grades": grades} for grades in ([10], [10, 10, 10], [10, 11], [-1, 0], [True, 0], [math.nan, 0], "x", None,
                                            {}, [[10, 10]], [10, None], 7)),
        *({"tokens": tokens} for tokens in ("x", [1], [1, 2, 3], [-1, 2], [1.5, 2], [True, 1], {}, 7, [None, None])),
        {"tokens": [10**400, 1]},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_run_keeps_is_asked_again(tmp_path: Path, forged: Any):
    """A file of a stranger's, or of a broken disk: no reward of a line that no run writes, and no error of Python."""
    file = tmp_path / "judge.jsonl"
    with endpoint(lambda *_: said([4, 6])) as at:
        first = asked(judge(at), "2", cache=JudgeCache(file))
        kept = json.loads(file.read_text())
        file.write_bytes((forged if isinstance(forged, bytes) else json.dumps(kept | forged).encode()) + b"\n")

        assert asked(judge(at), "2", cache=JudgeCache(file)) == first
        assert len(at.asked) == 2
        assert asked(judge(at), "2", cache=JudgeCache(file)) == first
        assert len(at.asked) == 2


def test_the_pool_adds_the_judge_to_the_other_rewards():
    """2 * 0.5 + right or wrong; agreement and tokens are parts without a weight; an error is no reward."""

    def reply(body: dict[str, Any], _: int) -> tuple[int, Any]:
        return (400, {}) if "broken" in body["messages"][1]["content"] else said([10, 0])

    async def graded(at: Endpoint) -> Any:
        rewards = (WeightedReward(judge(at), weight=2.0), WeightedReward(Numeric()))
        async with GradingPool(Grading(rewards), load=lambda s: JudgeClient(s, JudgeCache())) as pool:
            return await pool.grade_together([Sample("1 + 1 =", a, columns={"answer": "2"}) for a in ("2", "broken")])

    with endpoint(reply) as at:
        right, broken = asyncio.run(graded(at))

    assert right.reward == 2.0
    assert right.parts == {"judge": 0.5, "numeric": 1.0, "judge_agreement": 1.0, "judge_tokens": 110.0}
    assert broken.reward is None
    assert "judge: the judge gave no grades" in broken.error


def test_settings_that_cannot_be_meant_are_refused():
    """An address that holds a login, no criterion, weights of another number, and a bound that is none."""
    for changes, why in (
        ({"url": "http://me:secret@host/v1"}, "url"), ({"url": "ftp://host"}, "url"),
        *(({"url": f"http://{place}/v1"}, "url") for place in ("[::1", "a:99999", "a:x", "a b", "a\nb", "", ":80")),
        ({"criteria": ()}, "criteria"),
        ({"criterion_weights": (1.0,)}, "criterion_weights"), ({"max_disagreement": 2.0}, "max_disagreement"),
        ({"over": "group"}, "even with over"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            RubricJudge(**{"url": "http://host/v1", "judge": "m", "criteria": CRITERIA, **changes})


def test_a_judge_in_a_run_of_another_user_is_named_before_it_is_asked():
    """The address and the variable that would be sent there are shown, also where a held-out set names the judge."""
    table = {"kind": "judge", "url": "http://there/v1", "variable": "HOME_KEY"}
    said = "judge at http://there/v1 with the key in HOME_KEY"

    assert said in named_code({"rewards": [table]})
    assert said in named_code({"evaluation": {"tasks": [{"task": "gsm8k", "rewards": [{"verifier": table}]}]}})


def test_a_run_and_its_evaluation_ask_the_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rewards are the judge's, its tokens a metric, its replies in the run's directory; a dead judge is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGES_KEY", "very-secret-0123")
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(10)]
    with endpoint(lambda body, _: said([len(body["messages"][1]["content"]) % 11, 5])) as at:
        reward = {
            "kind": "judge", "url": at.url, "judge": "m", "criteria": list(CRITERIA), "pause_seconds": 0.0,
            "variable": "JUDGES_KEY",
        }  # fmt: skip
        given = {
            "model": "tiny", "dataset": rows, "rewards": [reward], "rollouts_per_step": 16, "precision": "fp32",
            "max_completion_length": 3, "held_out": {"size": 2, "fraction": 0.3},
        }  # fmt: skip
        run = gnomon.train(**given, steps=1)

    assert run.metrics["reward/judge_tokens_mean"] == [110.0]
    assert run.metrics["reward/judge_agreement_mean"] == [1.0]
    assert all(0.0 <= each.rollout.grade.reward <= 1.0 for each in run.rollouts(1))
    assert set(at.keys) == {"Bearer very-secret-0123"}
    assert 'variable = "JUDGES_KEY"' in (run.directory / "experiment.toml").read_text()
    files = [file for file in run.directory.rglob("*") if file.is_file()]
    assert not [file for file in files if b"very-secret" in file.read_bytes()]
    kept = [json.loads(line) for line in (run.directory / "judged.jsonl").read_text().splitlines()]
    assert len(kept) == len({each["request"] for each in kept}) <= len(at.asked)
    with pytest.raises(RewardError, match=r"the judge 'm' at http.*attempts"):
        gnomon.train(**given, steps=1, run_dir=tmp_path / "other")
