"""The client of a judge: votes by HTTP, tries that are bounded, and a file of what the judge said.

A reply counts only as the JSON object that was asked for. What a judge said is kept by the request's digest: a run that
goes on reads there what it was told before, and no request is made twice.
"""

import hashlib
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gnomon.core.errors import RewardError
from gnomon.core.processes.exceptions import shorten
from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.grader_pool import Scorer
from gnomon.rewards.judge import BEST, RubricJudge

# Client errors that pass: timeout, conflict, too early, too many requests. Any other 4xx stays what it is.
_AGAIN = (408, 409, 425, 429)
_LONGEST_REPLY, _PART = 1 << 22, 1 << 16
_PER_MILLION = 1e-6


class JudgingPolicy(Protocol):
    """The policy as a judge; called in a thread that may wait."""

    @property
    def version(self) -> int:
        """Of the weights that answer now."""

    def __call__(
        self, body: Mapping[str, Any], schema: Mapping[str, Any], seed: str, is_over: Callable[[], bool]
    ) -> dict[str, Any]:
        """Return a reply of the endpoint's form that obeys ``schema``, with the ``version`` of its weights.

        Args:
            seed: What the draws depend on, beside the run's seed.
            is_over: Whether nobody waits any more.

        Raises:
            VerifierError: The prompt is too long, or it is over.
        """


class JudgeCache:
    """What a judge said, by the digest of what it was asked; in a file of JSON lines, or in memory alone.

    Attributes:
        policy: Who answers where the policy judges; set once there is an engine.

    Args:
        path: The file; None keeps nothing beyond the process. A last line that was cut off is left out, and so is one
            that no run writes: what it answers is asked again.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.policy: JudgingPolicy | None = None
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        self._gates: dict[str, threading.Lock] = {}
        if path is None or not path.is_file():
            return
        # A process that was killed while it wrote leaves a last line
        # without its end; the next line would be glued to it.
        whole, newline, cut = path.read_bytes().rpartition(b"\n")
        if cut:
            os.truncate(path, len(whole) + len(newline))
        for line in whole.splitlines():
            try:
                said = json.loads(line)
                self._known[str(said["request"])] = dict(said)
            except (ValueError, TypeError, LookupError, RecursionError):
                continue

    def said(
        self, request: str, ask: Callable[[], dict[str, Any]], is_sound: Callable[[Mapping[str, Any]], bool]
    ) -> dict[str, Any]:
        """Return what was said to a request; where it was never made, or what was kept is not sound, ``ask`` makes it,
        and its reply is kept first.
        """
        # One lock for each request: two samples with the same text
        # wait for one reply, and other requests do not wait at all.
        with self._lock:
            gate = self._gates.setdefault(request, threading.Lock())
        with gate:
            if request not in self._known or not is_sound(self._known[request]):
                # Written before it is used: a run that is killed afterwards reads the same grades when it goes on.
                reply = {"request": request, **ask()}
                with self._lock:
                    self._write(reply)
                self._known[request] = reply
            return self._known[request]

    def _write(self, reply: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(json.dumps(reply).encode() + b"\n")


class JudgeClient(Scorer):
    """Asks a judge for its votes on answers.

    Args:
        settings: The judge.
        cache: What it said before.

    Raises:
        RewardError: The variable that should hold the key is not set.
    """

    def __init__(self, settings: RubricJudge, cache: JudgeCache) -> None:
        self._settings, self._cache = settings, cache
        self._key = os.environ.get(settings.variable, "") if settings.variable else ""
        if settings.variable and not self._key:
            raise RewardError(
                f"the judge's key should be in the environment variable {settings.variable}, which is not set; "
                f"export {settings.variable}=..., or set variable = '' for an endpoint without a key"
            )
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="judge")
        self._closed = threading.Event()
        self._opener = urllib.request.build_opener(_NoRedirect)

    def try_once(self) -> None:
        """Ask for one vote on a made answer.

        Raises:
            RewardError: If the judge cannot be asked, with the cause.
        """
        try:
            self._said([Sample("1 + 1 =", "2"), Sample("1 + 1 =", "3")][: 1 + (self._settings.over == "group")], 0)
        except VerifierError as error:
            raise RewardError(f"the judge '{self._settings.judge}' at {self._settings.url}: {error}") from error

    def __call__(self, samples: Sequence[Sample]) -> list[Mapping[str, float] | str]:
        """Return each answer's score, agreement, tokens and cost by the end of their names, or why it has none."""
        if self._settings.over == "group":
            return self._compared(samples)
        # All votes are submitted before the first is waited for, so `concurrency` requests are on their way at once.
        asked = [[self._threads.submit(self._said, [s], n) for n in range(self._settings.votes)] for s in samples]
        return [self._counted(partial(_results, votes)) for votes in asked]

    def _compared(self, samples: Sequence[Sample]) -> list[Mapping[str, float] | str]:
        """Return what all answers to a question get, each text once; a share of the tokens each."""
        plan, texts = self._settings, [json.dumps(self._settings.spoken(sample)) for sample in samples]
        # Equal answers are shown once: a judge that compares would otherwise give twins different grades.
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        different = [samples[texts.index(text)] for text in places]
        orders = [plan.order(len(different), vote) for vote in range(plan.votes)]
        asked = [self._threads.submit(self._said, [different[i] for i in o], n) for n, o in enumerate(orders)]

        def of(place: int) -> list[dict[str, Any]]:
            said = list(zip(_results(asked), orders, strict=True))
            # The tokens of one request are divided among the answers, so
            # that sums over a group count each request once.
            shares = [one["tokens"] and [tokens / len(samples) for tokens in one["tokens"]] for one, _ in said]
            rows = [one["grades"][order.index(place)] for one, order in said]
            return [{"grades": row, "tokens": share} for row, share in zip(rows, shares, strict=True)]

        return [self._counted(partial(of, places[text])) for text in texts]

    def close(self) -> None:
        """Make no further request."""
        self._closed.set()

    def _counted(self, wait: Callable[[], Sequence[dict[str, Any]]]) -> dict[str, float] | str:
        plan = self._settings
        try:
            said = wait()
        except VerifierError as error:
            return str(error)
        votes = [plan.vote(each["grades"]) for each in said]
        gap = max(votes) - min(votes)
        if gap > plan.max_disagreement:
            shown = ", ".join(f"{vote:.2f}" for vote in votes)
            return (
                f"the judge's votes are {shown}: they differ by {gap:.2f}, more than max_disagreement = "
                f"{plan.max_disagreement:g}"
            )
        counted = {"": sum(votes) / len(votes), "_agreement": 1.0 - gap}
        if all(each["tokens"] is not None for each in said):
            read, written = (float(sum(each["tokens"][side] for each in said)) for side in (0, 1))
            cost = (read * plan.input_price + written * plan.output_price) * _PER_MILLION
            counted |= {"_tokens": read + written} | ({"_cost": cost} if plan.input_price or plan.output_price else {})
        return counted

    def _said(self, samples: Sequence[Sample], vote: int) -> dict[str, Any]:
        """Return one vote: grades, and tokens read and written where the endpoint says.

        Raises:
            VerifierError: If there is none after all attempts.
        """
        plan = self._settings
        body = {
            "model": plan.judge,
            "messages": plan.messages(*samples),
            "temperature": plan.temperature,
            "max_tokens": plan.max_tokens,
        }
        # What the reply depends on, and nothing else: the number of the vote keeps
        # equal requests apart, and the policy answers otherwise after each step.
        said = [plan.url, body, vote] + ([self._policy.version] if plan.is_policy else [])
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        many = len(samples) if plan.over == "group" else None

        def is_sound(kept: Mapping[str, Any]) -> bool:
            return _are_grades(kept.get("grades"), len(plan.criteria), many) and _are_tokens(kept.get("tokens"))

        return self._cache.said(digest, partial(self._asked, body, many, digest), is_sound)

    @property
    def _policy(self) -> JudgingPolicy:
        assert self._cache.policy is not None, "the engine is there before an answer is judged"
        return self._cache.policy

    def _asked(self, body: dict[str, Any], answers: int | None, digest: str) -> dict[str, Any]:
        plan, cause = self._settings, ""
        if plan.is_policy:
            reply = self._policy(body, plan.schema(answers or 1), digest, self._closed.is_set)
            try:
                grades = _read(reply, len(plan.criteria), answers)
            except _Unusable as error:  # cut off at max_tokens
                raise VerifierError(f"the policy gave no grades: {shorten(str(error))}") from None
            return {**grades, "version": reply["version"]}
        retry_after = 0.0
        for attempt in range(plan.attempts):
            # The pause doubles with each attempt, and the endpoint's Retry-After is
            # honored where that is longer. A closed client ends the wait at once.
            if self._closed.wait(max(retry_after, plan.pause_seconds * 2 ** (attempt - 1)) if attempt else 0):
                raise VerifierError("the run ended before the judge was asked")
            try:
                return _read(self._reply(body), len(plan.criteria), answers)
            except _Unusable as error:
                cause, retry_after = shorten(str(error)), min(error.wait_seconds, plan.timeout_seconds)
                if error.is_final:
                    break
        raise VerifierError(f"the judge gave no grades in {attempt + 1} of {plan.attempts} attempts: {cause}")

    def _reply(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(
            f"{self._settings.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        seconds, said = self._settings.timeout_seconds, b""
        until = time.monotonic() + seconds
        try:
            with self._opener.open(request, timeout=seconds) as reply:
                # The socket's timeout bounds each read, not the whole reply:
                # an endpoint that sends a byte a second would never end.
                while len(said) < _LONGEST_REPLY and (part := reply.read1(_PART)):
                    said += part
                    if time.monotonic() > until:
                        raise TimeoutError(f"no whole reply in {seconds:g} s")
        except urllib.error.HTTPError as error:
            # The error is the open response: without ``with`` its socket would stay open.
            with error:
                # A key that the text repeats is found whole before the text is cut.
                text = self._without_key(error.read(_PART).decode(errors="replace"))[:300]
            is_final = error.code < 500 and error.code not in _AGAIN
            wait = error.headers.get("Retry-After", "")
            seconds = float(wait) if wait.isdecimal() else 0.0
            raise _Unusable(f"HTTP {error.code}: {' '.join(text.split())}", is_final, seconds) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise _Unusable(self._without_key(f"{type(error).__name__}: {error}")) from None
        try:
            return json.loads(said)
        except (ValueError, RecursionError):
            text = " ".join(self._without_key(said[:_PART].decode(errors="replace"))[:100].split())
            raise _Unusable(f"the reply is no JSON: {text!r}") from None

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


class _Unusable(Exception):
    """A request that brought no grades. is_final: another one would bring none either, or after ``wait_seconds``."""

    def __init__(self, cause: str, is_final: bool = False, wait_seconds: float = 0.0) -> None:
        super().__init__(cause)
        self.is_final, self.wait_seconds = is_final, wait_seconds


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""
        return


def _results(votes: Sequence[Future[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [vote.result() for vote in votes]


def _read(reply: Any, count: int, answers: int | None) -> dict[str, Any]:
    """Return grades and tokens of a reply; raise _Unusable for anything but the object that was asked for.

    Args:
        answers: Number of lists of ``count`` numbers; None for one list alone.
    """
    try:
        text = reply["choices"][0]["message"]["content"]
        fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, re.DOTALL)
        grades = json.loads(fenced[1] if fenced else text)["grades"]
        if not _are_grades(grades, count, answers):
            lists = "" if answers is None else f"{answers} lists of "
            raise ValueError(f"{lists}{count} numbers from 0 to {BEST} were asked for")
        usage = reply.get("usage") or {}
        tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _Unusable(f"the reply is not what was asked for ({error}): {json.dumps(reply)[:200]}") from None
    return {"grades": grades, "reply": text, "tokens": tokens if _are_tokens(tokens) else None}


def _are_grades(grades: Any, count: int, answers: int | None) -> bool:
    rows = [grades] if answers is None else grades
    return isinstance(rows, list) and len(rows) == (answers or 1) and all(_is_row(row, count) for row in rows)


def _are_tokens(tokens: Any) -> bool:
    """Whether these are counts of what was read and written, or None."""
    is_pair = isinstance(tokens, list) and len(tokens) == 2
    return tokens is None or (is_pair and all(type(count) is int and 0 <= count < 2**53 for count in tokens))


def _is_row(row: Any, count: int) -> bool:
    is_list = isinstance(row, list) and len(row) == count
    return is_list and all(type(grade) in (int, float) and 0 <= grade <= BEST for grade in row)
