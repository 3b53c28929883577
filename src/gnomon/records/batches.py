"""The recorded batch, ``gnomon-batch/1``: one optimizer step as JSON that any tool can write."""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.core.atomic_files import read_plain_text, step_files, write_durably
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Batch
from gnomon.records.jsonl import Warn, warn_on_stderr

FORMAT = "gnomon-batch/1"
REQUIRED = ("prompt_id", "reward", "mask", "current", "behavior")
OPTIONAL = ("truncated", "proximal", "reference", "values", "baseline", "bootstrap")
ARRAYS = ("current", "behavior", "proximal", "reference", "values")
_SHOWN = 20
# Engines round: a log-probability of 0 may come out slightly above.
_LARGEST = 1e-3
_CELLS = 100_000_000
_FLOAT32 = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class RecordedBatch:
    """What a recorded batch says.

    Attributes:
        batch: float64; ``tokens`` are 0 and prompts empty, for the form has neither. ``proximal`` is never None.
        current: Float64[B T], of the policy that the loss is taken at.
        prompt_ids: One per row.
    """

    batch: Batch
    current: Tensor
    prompt_ids: tuple[str, ...]


@dataclass
class BatchLog:
    """Writes ``batches/step-000012.json`` for `gnomon dissect`: one file per step, whole or absent.

    A step that cannot be written is counted and warned of once; it never ends a run.
    """

    directory: Path
    warn: Warn = warn_on_stderr
    lost: int = 0

    def write(self, step: int, batch: Batch, current: Tensor | None = None) -> None:
        """Write the batch of a step, as `write_batch`."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_batch(self.directory / f"step-{step:06d}.json", batch, current)
        except (OSError, ValueError) as error:
            if self.lost == 0:
                self.warn(f"a batch cannot be written to {self.directory}, the run goes on without: {error}")
            self.lost += 1

    def keep(self, step: int, batch: Batch) -> Path | None:
        """Write the batch of a step that could not be learned from; return its file, None when it cannot be written.

        What is not finite is spelled "nan", "inf" or "-inf": `read_batch` names each place.
        """
        path = self.directory / f"step-{step:06d}.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_batch(path, batch, is_spelled=True)
        except (OSError, ValueError) as error:
            self.warn(f"the batch of step {step} cannot be kept in {self.directory}: {error}")
            return None
        return path

    def drop_after(self, step: int) -> None:
        """Remove the files of later steps, which a run that resumes at ``step`` will make again."""
        for number, path in step_files(self.directory, "json"):
            if number > step:
                path.unlink()


def write_batch(
    path: Path,
    batch: Batch,
    current: Tensor | None = None,
    prompt_ids: Sequence[str] = (),
    is_spelled: bool = False,
) -> None:
    """Write ``batch`` in the form above, at once.

    Rows that could not be graded are left out, as from every statistic and loss.

    Args:
        current: Float[B T]; without it ``proximal``, which it equals on the first inner step, or else ``behavior``.
        prompt_ids: One per row; without them the batch's ``task_ids``, and without these the group's number.
        is_spelled: Write "nan", "inf" and "-inf" for what is not finite.

    Raises:
        ConfigError: If ``prompt_ids`` or ``current`` do not fit the batch.
        ValueError: If a number that is not masked is not finite.
        OSError: If the file cannot be written.
    """
    names = [str(name) for name in prompt_ids or batch.task_ids] or [str(int(g)) for g in batch.group]
    now = current if current is not None else batch.proximal if batch.proximal is not None else batch.behavior
    if len(names) != len(batch) or now.shape != batch.mask.shape:
        raise ConfigError(
            f"a batch of {tuple(batch.mask.shape)} needs a prompt id per row and current log-probabilities of its "
            f"shape, got {len(names)} ids and {tuple(now.shape)}"
        )
    matrices = {"current": now, "behavior": batch.behavior, "proximal": batch.proximal}
    matrices |= {"reference": batch.reference, "values": batch.values}
    written = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    sequences = [_sequence(batch, row, names[row], written) for row in range(len(batch)) if batch.is_graded[row]]
    content: Any = {"format": FORMAT, "temperature": batch.temperature, "sequences": sequences}
    content = _spelled(content) if is_spelled else content
    write_durably(path, (json.dumps(content, allow_nan=False) + "\n").encode(), is_synced=False)


def _sequence(batch: Batch, row: int, prompt_id: str, matrices: Mapping[str, Tensor]) -> dict[str, Any]:
    length = int(batch.lengths[row] - batch.prompt_lengths[row])
    mask = batch.mask[row, :length]
    sequence = {
        "prompt_id": prompt_id,
        "reward": float(batch.rewards[row]),
        "truncated": bool(batch.is_truncated[row]),
        "mask": mask.int().tolist(),
    }
    for name, matrix in matrices.items():
        # 0 where masked: what is there means nothing, and may be no number at all.
        sequence[name] = torch.where(mask, matrix[row, :length].detach().double(), 0.0).tolist()
    if batch.baseline is not None:
        sequence["baseline"] = float(batch.baseline[row])
    if batch.bootstrap is not None:
        sequence["bootstrap"] = float(batch.bootstrap[row])
    return sequence


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spelled(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_spelled(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_batch(path: Path) -> RecordedBatch:
    """Return what a file in the form above says.

    ``temperature`` defaults to 1, ``truncated`` to false, ``proximal`` to ``behavior``. ``reference``, ``values``,
    ``baseline`` and ``bootstrap`` (the critic's value after the last token) are there for every sequence or for none.
    Whatever stands at a masked position is read as 0.

    Raises:
        DatasetError: The content is wrong; the message lists sequence, field and position of each mistake.
    """
    try:
        content = json.loads(read_plain_text(path))
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise DatasetError(f"{path} is nested too deeply to be a recorded batch") from error
    except ValueError as error:
        raise DatasetError(f"{path} is no JSON: {error}") from error
    except MemoryError as error:
        raise DatasetError(f"{path} is larger than this machine's memory; record fewer sequences a file") from error
    return parse_batch(content, str(path))


def parse_batch(content: Any, source: str) -> RecordedBatch:
    """Return what a parsed file says; ``source`` names it in messages.

    Raises:
        DatasetError: As `read_batch`.
    """
    problems = _check_top(content)
    sequences: list[Any] = [] if problems else content["sequences"]
    for number, sequence in enumerate(sequences):
        problems += [f"sequence {number}: {problem}" for problem in _check_sequence(sequence)]
    if not problems:
        problems = _check_together(sequences)
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise DatasetError(f"{source} is no usable batch:\n  " + "\n  ".join(problems[:_SHOWN] + more))
    return _assemble(sequences, float(content.get("temperature", 1.0)))


def _assemble(sequences: Sequence[Mapping[str, Any]], temperature: float) -> RecordedBatch:
    lengths = torch.tensor([len(s["mask"]) for s in sequences])
    count, width = len(sequences), int(lengths.max())
    masks = [[bool(chosen) for chosen in s["mask"]] for s in sequences]
    mask = torch.zeros(count, width, dtype=torch.bool)
    for number, chosen in enumerate(masks):
        mask[number, : len(chosen)] = torch.tensor(chosen, dtype=torch.bool)

    def matrix(name: str, otherwise: str = "") -> Tensor | None:
        rows = [s.get(name, s.get(otherwise)) for s in sequences]
        if any(row is None for row in rows):
            return None
        padded = torch.zeros(count, width, dtype=torch.float64)
        for number, (row, chosen) in enumerate(zip(rows, masks, strict=True)):
            read = [float(value) if is_chosen else 0.0 for value, is_chosen in zip(row, chosen, strict=True)]
            padded[number, : len(read)] = torch.tensor(read, dtype=torch.float64)
        return padded

    def numbers(name: str) -> Tensor | None:
        if name not in sequences[0]:
            return None
        return torch.tensor([float(s[name]) for s in sequences], dtype=torch.float64)

    names = [str(s["prompt_id"]) for s in sequences]
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    current, behavior = matrix("current"), matrix("behavior")
    assert current is not None, "checked: current is required"
    assert behavior is not None, "checked: behavior is required"
    batch = Batch(
        tokens=torch.zeros(count, width, dtype=torch.long),
        prompt_lengths=torch.zeros(count, dtype=torch.long),
        lengths=lengths,
        mask=mask,
        rewards=torch.tensor([float(s["reward"]) for s in sequences], dtype=torch.float64),
        is_graded=torch.ones(count, dtype=torch.bool),
        is_truncated=torch.tensor([s.get("truncated", False) for s in sequences]),
        group=torch.tensor([order[name] for name in names]),
        version=torch.zeros(count, dtype=torch.long),
        behavior=behavior,
        full_behavior=behavior,
        temperature=temperature,
        task_ids=tuple(names),
        baseline=numbers("baseline"),
        proximal=matrix("proximal", "behavior"),
        reference=matrix("reference"),
        values=matrix("values"),
        bootstrap=numbers("bootstrap"),
    )
    return RecordedBatch(batch, current, tuple(names))


def _check_top(content: Any) -> list[str]:
    if not isinstance(content, dict):
        return [f"expected one JSON object, got {_kind(content)}"]
    if content.get("format") != FORMAT:
        return [f'"format" should be "{FORMAT}", got {json.dumps(content.get("format"))}']
    problems = []
    temperature = content.get("temperature", 1.0)
    if not _is_number(temperature) or temperature <= 0:
        problems.append(f'"temperature" should be a number > 0, got {_show(temperature)}')
    if not isinstance(content.get("sequences"), list) or not content["sequences"]:
        problems.append('"sequences" should be a list with at least one sequence')
    return problems


def _check_sequence(sequence: Any) -> list[str]:
    if not isinstance(sequence, dict):
        return [f"expected an object, got {_kind(sequence)}"]
    problems = [f'"{name}" is missing' for name in REQUIRED if name not in sequence]
    for key in sequence.keys() - {*REQUIRED, *OPTIONAL}:
        near = difflib.get_close_matches(key, (*REQUIRED, *OPTIONAL), n=1, cutoff=0.8)
        problems += [f'"{key}" is not known; did you mean "{near[0]}"?'] if near else []
    if not isinstance(sequence.get("prompt_id", ""), str | int) or isinstance(sequence.get("prompt_id"), bool):
        problems.append(f'"prompt_id" should be a string, got {_show(sequence["prompt_id"])}')
    for name in ("reward", "baseline", "bootstrap"):
        if name in sequence and not _is_number(sequence[name]):
            problems.append(f'"{name}" should be a finite number, got {_show(sequence[name])}')
        elif name in sequence and abs(sequence[name]) > _FLOAT32:
            problems.append(f'"{name}" should be at most {_FLOAT32:.3g} either way, got {_show(sequence[name])}')
    if not isinstance(sequence.get("truncated", False), bool):
        problems.append(f'"truncated" should be true or false, got {_show(sequence["truncated"])}')
    return problems + _check_arrays(sequence)


def _check_arrays(sequence: Mapping[str, Any]) -> list[str]:
    mask = sequence.get("mask", [])
    if not isinstance(mask, list):
        return [f'"mask" should be a list of 0 and 1, got {_kind(mask)}']
    problems = [
        f'"mask" at position {position} should be 0 or 1, got {_show(value)}'
        for position, value in enumerate(mask)
        if not isinstance(value, int | float) or value not in (0, 1)
    ]
    for name in ARRAYS if "mask" in sequence else ():
        if name not in sequence:
            continue
        array = sequence[name]
        if not isinstance(array, list):
            problems.append(f'"{name}" should be a list of numbers, got {_kind(array)}')
            continue
        if len(array) != len(mask):
            problems.append(f'"{name}" has {len(array)} positions, and "mask" has {len(mask)}')
        problems += [
            f'"{name}" at position {position} should be a finite number, got {_show(value)}'
            for position, (value, chosen) in enumerate(zip(array, mask, strict=False))
            if chosen == 1 and not _is_number(value)
        ]
        problems += [
            f'"{name}" at position {position} should be a log-probability, at most 0, got {_show(value)}; is it a '
            "probability?"
            for position, (value, chosen) in enumerate(zip(array, mask, strict=False))
            if name != "values" and chosen == 1 and _is_number(value) and value > _LARGEST
        ]
    return problems


def _check_together(sequences: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    widest = max(len(sequence["mask"]) for sequence in sequences)
    if widest * len(sequences) > _CELLS:
        problems.append(
            f"{len(sequences)} sequences padded to the longest, {widest} positions, are more than {_CELLS:,} numbers; "
            "record long and short sequences in different files"
        )
    for name in ("reference", "values", "baseline", "bootstrap"):
        lacking = [number for number, sequence in enumerate(sequences) if name not in sequence]
        if 0 < len(lacking) < len(sequences):
            problems.append(f'sequence {lacking[0]}: "{name}" is missing, and other sequences have it')
    return problems


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
