"""Every graded rollout of every step, as JSON lines that a person or a program can read."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter

from gnomon.core.atomic_files import open_plain, write_durably
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.optional import Tensor, torch
from gnomon.core.redaction import redacted
from gnomon.core.types import Batch, Ending, Grade, Group, Rollout, StopReason
from gnomon.records.jsonl import Warn, warn_on_stderr

# Per-token records: what a step made of each rollout that it trained on.
#
# What lies in the prepared batch anyway is written for every rollout, so that it costs nothing but the writing; what
# the learner has to be asked for, for a few. Numbers are rounded: log-probabilities, entropies and values to 5
# decimals, advantages to 5 digits of the largest of the step.

DECIMALS = 5


@dataclass(frozen=True)
class TokenRecord:
    """What a step made of one rollout. Each list has a number a response token, or is empty where nothing is known.

    Attributes:
        advantages: After `Algorithm.prepare`; empty for a rollout that was not trained on, 0 where a token is masked.
        proximal: Log-probabilities of the learner when the step began, where an algorithm asked for them or the rollout
            was looked at.
        entropy: Of the learner's distribution of the token then, in nats, where it was looked at.
        reference: Log-probabilities of the reference policy or teacher, where an algorithm asked for them.
        values: Of the critic, before each token.
        baseline: The tracked value of the task, read before this visit; None without a tracker.
    """

    advantages: tuple[float, ...] = ()
    proximal: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    baseline: float | None = None
    entropy: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()


@dataclass(frozen=True)
class TokenStats:
    """What the learner said of N rows of a batch when the step began.

    Attributes:
        logprobs: Float[N T].
        entropy: Float[N T].
    """

    rows: tuple[int, ...]
    logprobs: Tensor
    entropy: Tensor


def token_records(
    batch: Batch, rollouts: Sequence[Rollout], seen: TokenStats | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the fields of each rollout's line, in order; no field for a rollout that ``batch`` has no row of.

    What is not finite stays so here, and is null in the file.

    A row belongs to the rollout with its task id and its tokens, whatever the order of rows.

    Args:
        seen: Of some rows of it. A proximal policy that the algorithm asked for is never replaced by what was seen: it
            may be an average of weights. ``advantages`` is one number where it is the same on every trained token, as
            without a critic it is.

    Raises:
        ConfigError: A row of ``batch`` belongs to none of the rollouts.
    """
    # Rows and rollouts are matched by content: filters and padding may have changed their order and number.
    found = _rows_of(batch, rollouts)
    is_trained = batch.mask.any(1).tolist()
    scored = {"proximal": batch.proximal, "reference": batch.reference, "values": batch.values}
    matrices = {name: _rows(m) for name, m in scored.items() if m is not None}
    advantages = None if batch.advantages is None else _advantages(batch.advantages, batch.mask)
    baseline = None if batch.baseline is None else _rows(batch.baseline)
    looked = {} if seen is None else _looked(seen)
    for row, rollout in zip(found, rollouts, strict=True):
        if row is None:
            yield {}
            continue
        length = len(rollout.response)
        fields: dict[str, Any] = {name: lists[row][:length] for name, lists in matrices.items()}
        if advantages is not None and is_trained[row]:
            one = advantages[row]
            fields["advantages"] = one[:length] if isinstance(one, list) else one
        if baseline is not None:
            fields["baseline"] = baseline[row]
        if row in looked:
            proximal, entropy = looked[row]
            # The order of the union lets an algorithm's own proximal policy replace the one that was seen.
            fields = {"proximal": proximal[:length]} | fields | {"entropy": entropy[:length]}
        yield fields


def _rows_of(batch: Batch, rollouts: Sequence[Rollout]) -> list[int | None]:
    """Return the row of each rollout, None where the batch has none."""
    if len(batch.task_ids) != len(batch):
        raise ConfigError("a batch without task ids cannot be recorded beside its rollouts")
    rows: dict[tuple[str, bytes], list[int]] = {}
    pairs = zip(batch.task_ids, batch.tokens.long().cpu().numpy(), batch.lengths.tolist(), strict=True)
    # Equal responses to one task have equal keys; each takes the
    # next row, and their order does not matter as they are the same.
    for row, (task_id, tokens, length) in enumerate(pairs):
        rows.setdefault((task_id, tokens[:length].tobytes()), []).append(row)
    found: list[int | None] = []
    for rollout in rollouts:
        # Bytes of 64-bit integers on both sides, so a comparison of thousands of tokens is one of bytes.
        same = rows.get((rollout.task_id, array("q", rollout.prompt + rollout.response).tobytes()))
        found.append(same.pop(0) if same else None)
    strange = [task_id for (task_id, _), left in rows.items() for _ in left]
    if strange:
        raise ConfigError(f"{len(strange)} of {len(batch)} rows belong to no rollout of the step: {strange[:5]}")
    return found


def _looked(seen: TokenStats) -> dict[int, tuple[list[float], list[float]]]:
    pairs = zip(_rows(seen.logprobs), _rows(seen.entropy), strict=True)
    return dict(zip(seen.rows, pairs, strict=True))


def read_taught(row: Mapping[str, Any]) -> TokenRecord:
    """Return what a line says.

    Raises:
        TypeError, ValueError: For fields that `token_records` does not write.
    """
    length = len(row["response"])
    said = row.get("advantages", [])
    advantages = said if isinstance(said, list) else [said] * length
    baseline = row.get("baseline")
    if baseline is not None and type(baseline) not in (int, float):
        raise TypeError(f"the field baseline is a {type(baseline).__name__}")
    return TokenRecord(
        advantages=_read("advantages", advantages, length),
        proximal=_read("proximal", row.get("proximal", []), length),
        values=_read("values", row.get("values", []), length),
        baseline=None if baseline is None else float(baseline),
        entropy=_read("entropy", row.get("entropy", []), length),
        reference=_read("reference", row.get("reference", []), length),
    )


def _read(name: str, values: Any, length: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) not in (0, length):
        raise ValueError(f"the field {name} should be a list of {length} numbers")
    if any(value is not None and type(value) not in (int, float) for value in values):
        raise TypeError(f"the field {name} holds what is no number")
    return tuple(math.nan if value is None else float(value) for value in values)


def _advantages(advantages: Tensor, mask: Tensor) -> list[float | list[float]]:
    """Return one number for each row where it is constant, else its list; 0 where masked."""
    known = torch.where(mask, advantages.detach().double(), 0.0)
    finite = known[known.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    # Five significant digits of the largest: advantages of 1e-4 would be all zeros at five decimals.
    decimals = DECIMALS - 1 - (math.floor(math.log10(largest)) if largest > 0 else 0)
    rounded = torch.round(known, decimals=max(0, min(decimals, 15)))
    least = torch.where(mask, rounded, math.inf).amin(1).tolist()
    most = torch.where(mask, rounded, -math.inf).amax(1).tolist()
    alike = [low == high for low, high in zip(least, most, strict=True)]
    return [low if same else row for low, same, row in zip(least, alike, rounded.tolist(), strict=True)]


def _rows(matrix: Tensor) -> list[Any]:
    rows: list[Any] = torch.round(matrix.detach().double(), decimals=DECIMALS).tolist()
    return rows


@dataclass(frozen=True)
class RecordedRollout:
    """One line of a rollout file.

    Attributes:
        group: Number within the step, in the order of asking; rollouts of one group answer one visit to one task.
        is_kept: False for a group that the filter refused.
        question: The task's text.
        taught: What its step made of it.
        line: Of the file, from 1; 0 where it is of none.
    """

    step: int
    group: int
    is_kept: bool
    question: str
    rollout: Rollout
    taught: TokenRecord = TokenRecord()
    line: int = field(default=0, compare=False)


@dataclass
class RolloutLog:
    """Writes ``rollouts/step-000012.jsonl``: one file per step, whole or absent.

    A line has ``step, group, kept, task_id, question, prompt, response, text, reward, error, parts, answer, logprobs,
    oldest_version, newest_version, stop``; token ids and natural logs. ``mask`` is left out when every token was the
    policy's own, and ``full_logprobs`` when they equal ``logprobs``. A conversation has ``turns, ended_by, cause``, and
    of each answer ``turn_ends``, ``turn_rewards`` and ``turn_seconds``.
    An agent's segment has the ``role`` that it called the policy by.
    A further segment of a rollout has a line of its own behind it, with its number as ``segment``.
    What was trained on has, as far as it was computed, ``advantages, proximal, reference, values, baseline``, and
    some of it ``entropy`` (see `taught`).
    A step that cannot be written is counted and warned of once; it never ends a run.
    """

    directory: Path
    warn: Warn = warn_on_stderr
    lost: int = 0

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        dropped: Sequence[Group] = (),
        batch: Batch | None = None,
        seen: TokenStats | None = None,
    ) -> None:
        """Write the rollouts of a step.

        Args:
            dropped: Groups that the filter refused.
            batch: What ``groups`` became.
            seen: Of some of its rows.
        """
        # One entry for each row of the batch, in the order of the loop
        # below; groups that were dropped come last and have none.
        taught = iter(
            () if batch is None else token_records(batch, [s for g in groups for r in g.rollouts for s in r.rows], seen)
        )
        numbered = enumerate([*((g, True) for g in groups), *((g, False) for g in dropped)])
        rows = [
            {"step": step, "group": number, "kept": is_kept, "question": group.task.text}
            | ({"segment": place} if place else {})
            | _row(segment)
            | next(taught, {})
            for number, (group, is_kept) in numbered
            for rollout in group.rollouts
            for place, segment in enumerate(rollout.rows)
        ]
        content = b"".join(_line(row) for row in redacted(rows))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_durably(self.directory / f"step-{step:06d}.jsonl", content, is_synced=False)
        except OSError as error:
            if self.lost == 0:
                self.warn(f"{self.directory} cannot be written, the run goes on without its rollouts: {error}")
            self.lost += 1


def read_rollouts(path: Path) -> Iterator[RecordedRollout]:
    """Yield what `RolloutLog` wrote, equal to what was given to it; what it taught is of a rollout's first segment.

    Raises:
        DatasetError: The message names the file, the line and what is wrong with it.
    """
    try:
        file = open_plain(path)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error
    latest: RecordedRollout | None = None
    with file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line.decode("utf-8"))
                _check_types(row)
                said = (row["step"], row["group"], row["kept"], row["question"])
                recorded = RecordedRollout(*said, _rollout(row), read_taught(row), number)
                # A segment without its rollout, or out of order, means that lines are missing.
                if (place := row.get("segment", 0)) != (0 if latest is None or not place else len(latest.rollout.rows)):
                    raise ValueError(f"segment {place} does not follow the one before")
            except KeyError as error:
                raise DatasetError(f"{path}, line {number}: the field {error} is missing") from error
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise DatasetError(f"{path}, line {number}: no rollout record: {error}") from error
            if place and latest is not None:
                segments = (*latest.rollout.segments, recorded.rollout)
                latest = replace(latest, rollout=replace(latest.rollout, segments=segments))
                continue
            if latest is not None:
                yield latest
            latest = recorded
    if latest is not None:
        yield latest


_TOKENS, _BEYOND = 1 << 31, 1 << 63
_TYPES: Mapping[str, tuple[type, ...]] = {
    "step": (int,), "group": (int,), "kept": (bool,), "question": (str,), "task_id": (str,), "text": (str,),
    "prompt": (list,), "response": (list,), "logprobs": (list, NoneType), "mask": (list,), "full_logprobs": (list,),
    "parts": (dict,), "error": (str, NoneType), "answer": (str, NoneType), "reward": (int, float, NoneType),
    "stop": (str,), "oldest_version": (int,), "newest_version": (int,), "turns": (int,), "segment": (int,),
    "turn_ends": (list,), "turn_rewards": (list,), "turn_seconds": (list,), "role": (str,),
}  # fmt: skip


def _check_types(row: Any) -> None:
    if not isinstance(row, dict):
        raise TypeError(f"expected an object, got {type(row).__name__}")
    for name in row.keys() & _TYPES.keys():
        if type(row[name]) not in _TYPES[name]:
            raise TypeError(f"the field {name} is a {type(row[name]).__name__}")
    arrays = (row.get(name) for name in ("response", "logprobs", "mask", "full_logprobs"))
    lengths = {len(array) for array in arrays if array is not None}
    if len(lengths) > 1:
        raise ValueError(f"response, log-probabilities and mask differ in length: {sorted(lengths)}")
    if any(type(token) is not int for name in ("prompt", "response") for token in row.get(name, ())):
        raise TypeError("tokens are whole numbers")
    ends = row.get("turn_ends", [])
    if any(type(end) is not int for end in ends) or len(ends) != len(row.get("turn_rewards", [])):
        raise ValueError("turn_ends are whole numbers, one for each of turn_rewards")
    counted = [row[name] for name, kinds in _TYPES.items() if kinds == (int,) and name in row]
    if any(not 0 <= token < _TOKENS for name in ("prompt", "response") for token in row.get(name, ())):
        raise ValueError("tokens are from 0 to 2147483647")
    if any(abs(number) >= _BEYOND for number in counted):
        raise ValueError("a whole number in it is beyond 63 bits")
    reward = row.get("reward")
    if reward is not None and not abs(reward) <= torch.finfo(torch.float32).max:
        raise ValueError(f"the reward is {reward:.8g}, where a number of float32 stands, or null beside an error")
    if row.get("stop", "stop") not in get_args(StopReason):
        raise ValueError(f"the field stop is {row['stop']!r}, where stop or length stands")


def _row(rollout: Rollout) -> dict[str, Any]:
    row: dict[str, Any] = {
        "task_id": rollout.task_id,
        "text": rollout.text,
        "reward": rollout.grade.reward,
        "error": rollout.grade.error,
        "parts": dict(rollout.grade.parts),
        "answer": rollout.grade.answer,
        "stop": rollout.stop,
        "oldest_version": rollout.oldest_version,
        "newest_version": rollout.newest_version,
        "prompt": rollout.prompt,
        "response": rollout.response,
        "logprobs": rollout.logprobs,
    }
    if not all(rollout.mask):
        row["mask"] = [int(chosen) for chosen in rollout.mask]
    if rollout.full_logprobs != rollout.logprobs:
        row["full_logprobs"] = rollout.full_logprobs
    if rollout.ending is not None:
        ending = rollout.ending
        row |= {"turns": ending.turns, "ended_by": ending.by, "cause": ending.cause}
    if rollout.turn_ends:
        row |= {"turn_ends": rollout.turn_ends, "turn_rewards": rollout.turn_rewards}
    if rollout.turn_seconds:
        row |= {"turn_seconds": [round(s, 3) for s in rollout.turn_seconds]}
    return row | {"role": rollout.role} if rollout.role else row


def _rollout(row: Mapping[str, Any]) -> Rollout:
    # null stands for a whole list that was not recorded; NaN then marks each token as unknown.
    known = row.get("logprobs")
    logprobs = _floats([None] * len(row["response"]) if known is None else known)
    return Rollout(
        task_id=row["task_id"],
        prompt=tuple(row["prompt"]),
        response=tuple(row["response"]),
        mask=tuple(map(bool, row["mask"])) if "mask" in row else (True,) * len(row["response"]),
        logprobs=logprobs,
        full_logprobs=_floats(row["full_logprobs"]) if "full_logprobs" in row else logprobs,
        text=row["text"],
        grade=Grade(
            row["reward"], row["parts"], row["error"], row.get("answer"), not row["reward"] is row["error"] is None
        ),
        oldest_version=row["oldest_version"],
        newest_version=row["newest_version"],
        stop=row["stop"],
        ending=Ending(row["turns"], row["ended_by"], row["cause"]) if "turns" in row else None,
        turn_ends=tuple(row.get("turn_ends", ())),
        turn_rewards=_floats(row.get("turn_rewards", ())),
        turn_seconds=_floats(row.get("turn_seconds", ())),
        role=row.get("role", ""),
    )


_ROW = TypeAdapter(dict[str, Any], config=ConfigDict(ser_json_inf_nan="null"))


def _line(row: dict[str, Any]) -> bytes:
    """Return a row as a line of JSON: null for what is not finite, an escape for half of a surrogate pair."""
    try:
        # pydantic writes JSON faster than json.dumps does, and refuses half a surrogate pair.
        return _ROW.dump_json(row) + b"\n"
    except ValueError:
        finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
        return json.dumps(finite).encode() + b"\n"


def _floats(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else float(value) for value in values)
