"""The recorded batch, ``gnomon-batch/1``: one optimizer step as JSON that any tool can write."""

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gnomon.core.atomic_files import read_plain_text, write_durably
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Batch
from gnomon.records.jsonl import Warn, warn_on_stderr

FORMAT = "gnomon-batch/1"
REQUIRED = ("prompt_id", "reward", "mask", "current", "behavior")
LOGPROBS = ("current", "behavior", "proximal", "sharpened", "reference", "teacher")
NUMBERS = (*LOGPROBS, "values", "step_rewards")
NAMES = ("turn", "state")
ARRAYS = (*NUMBERS, *NAMES)
PER_SEQUENCE = ("baseline", "bootstrap", "role", "rollout_id", "component_rewards")
OPTIONAL = ("truncated", *(name for name in ARRAYS if name not in REQUIRED), *PER_SEQUENCE)
_SHOWN = 3
# Engines round: a log-probability of 0 may come out slightly above.
LARGEST_LOGPROB = 1e-3
_ROUNDING = 1e-5
"""Share of a reward by which the sum of its steps may differ from it."""
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


def write_batch(
    path: Path, batch: Batch, current: Tensor | None = None, prompt_ids: Sequence[str] = (), is_spelled: bool = False
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
    # On the first inner step current and proximal are the same policy,
    # and without a proximal one the behavior policy stands for both.
    names = [str(name) for name in prompt_ids or batch.task_ids] or [str(int(g)) for g in batch.group]
    now = current if current is not None else batch.proximal if batch.proximal is not None else batch.behavior
    if len(names) != len(batch) or now.shape != batch.mask.shape:
        raise ConfigError(
            f"a batch of {tuple(batch.mask.shape)} needs a prompt id per row and current log-probabilities of its "
            f"shape, got {len(names)} ids and {tuple(now.shape)}"
        )
    rewards = batch.component_rewards
    if rewards is not None and bool(rewards[batch.is_graded].isnan().any()):
        # A reward that did not apply to a row; that is no 0, and the form has no word for it.
        batch = batch.with_fields(component_rewards=None, components=(), component_weights=())
    matrices = {"current": now} | {name: getattr(batch, name) for name in ARRAYS if name != "current"}
    written = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    sequences = [_sequence(batch, row, names[row], written) for row in range(len(batch)) if batch.is_graded[row]]
    content: Any = {"format": FORMAT, "temperature": batch.temperature, "sequences": sequences}
    if batch.component_rewards is not None:
        content["component_weights"] = dict(zip(batch.components, batch.component_weights, strict=True))
    # allow_nan=False below refuses NaN, which is no JSON: other tools could not read the file.
    content = _spelled(content) if is_spelled else content
    write_durably(path, (json.dumps(content, allow_nan=False) + "\n").encode(), is_synced=False)


def _sequence(batch: Batch, row: int, prompt_id: str, matrices: Mapping[str, Tensor]) -> dict[str, Any]:
    # Matrices of a batch are aligned to the response: column 0 is its first token, padding lies behind it.
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
        numbers = matrix[row, :length].detach()
        sequence[name] = torch.where(mask, numbers if name in NAMES else numbers.double(), 0).tolist()
    for name in ("baseline", "bootstrap", "rollout_id"):
        if (values := getattr(batch, name)) is not None:
            sequence[name] = values[row].item()
    if batch.role:
        sequence["role"] = batch.role[row]
    if batch.component_rewards is not None:
        sequence["component_rewards"] = dict(zip(batch.components, batch.component_rewards[row].tolist(), strict=True))
    return sequence


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spelled(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_spelled(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_batch(path: Path) -> RecordedBatch:
    """Return what a file in the form above says.

    ``temperature`` defaults to 1, ``truncated`` to false, ``proximal`` to ``behavior``. Every other field is there for
    all sequences or for none: ``reference``, ``values``, ``baseline``, ``bootstrap`` (the critic's value after the last
    token), and those of `Batch`: ``teacher``, ``sharpened``, ``step_rewards``, ``turn`` and ``state`` (numbers or
    texts) with an entry for each token; ``role`` (a text); ``rollout_id`` (a number or text, within a prompt: segments
    of one rollout, in order); ``component_rewards``, an object of names and numbers, or a list. The weights of these
    are in the file's own ``component_weights``, the names of a list in ``component_names``; they default to 1, and to
    "0", "1" and so on.
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
    # Checks of the whole come only when each sequence is sound: they index into fields.
    if not problems:
        problems = _check_together(sequences)
    if not problems:
        problems = _check_rollouts(sequences) + _check_components(content)
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise DatasetError(f"{source} is no usable batch:\n  " + "\n  ".join(problems[:_SHOWN] + more))
    return _assemble(sequences, float(content.get("temperature", 1.0)), _components(content))


def _components(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the weight of each component by its name, in the order of the first sequence; none without components."""
    found = content["sequences"][0].get("component_rewards", {})
    names = [*(found if isinstance(found, dict) else content.get("component_names", map(str, range(len(found)))))]
    weights = content.get("component_weights", {})
    given = weights if isinstance(weights, dict) else dict(zip(names, weights, strict=False))
    return {name: float(given.get(name, 1.0)) for name in names}


def _component_values(sequence: Mapping[str, Any], components: Mapping[str, float]) -> list[float]:
    found = sequence["component_rewards"]
    return [float(x) for x in (map(found.get, components) if isinstance(found, dict) else found)]  # type: ignore[arg-type]


def _numbered(names: Sequence[Any]) -> Tensor:
    """Return Int[N]: the names by number, in the order in which they come."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([order[name] for name in names], dtype=torch.long)


def _assemble(
    sequences: Sequence[Mapping[str, Any]], temperature: float, components: Mapping[str, float]
) -> RecordedBatch:
    lengths = torch.tensor([len(s["mask"]) for s in sequences])
    masks = [[bool(chosen) for chosen in s["mask"]] for s in sequences]
    mask = pad_sequence([torch.tensor(chosen, dtype=torch.bool) for chosen in masks], batch_first=True)
    count, width = mask.shape

    # (sequences, longest response), 0 where masked or padded: a masked entry may be null, NaN or a text.
    def matrix(name: str, otherwise: str = "") -> Tensor | None:
        rows = [s.get(name, s.get(otherwise)) for s in sequences]
        if any(row is None for row in rows):
            return None
        read = (
            [float(value) if is_chosen else 0.0 for value, is_chosen in zip(row, chosen, strict=True)]
            for row, chosen in zip(rows, masks, strict=True)
        )
        return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in read], batch_first=True)

    def numbers(name: str) -> Tensor | None:
        if name not in sequences[0]:
            return None
        return torch.tensor([float(s[name]) for s in sequences], dtype=torch.float64)

    names = [str(s["prompt_id"]) for s in sequences]
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
        group=_numbered(names),
        version=torch.zeros(count, dtype=torch.long),
        behavior=behavior,
        full_behavior=behavior,
        temperature=temperature,
        task_ids=tuple(names),
        baseline=numbers("baseline"),
        proximal=matrix("proximal", "behavior"),
        sharpened=matrix("sharpened"),
        reference=matrix("reference", "teacher"),
        values=matrix("values"),
        bootstrap=numbers("bootstrap"),
        step_rewards=matrix("step_rewards"),
        teacher=matrix("teacher"),
        **_named(sequences, mask, components),
    )
    return RecordedBatch(batch, current, tuple(names))


def _named(sequences: Sequence[Mapping[str, Any]], mask: Tensor, components: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields that tell rewards, answers, states, roles and rollouts apart; texts are numbered in order."""
    found: dict[str, Any] = {"role": tuple(s["role"] for s in sequences if "role" in s)}
    if components:
        rewards = torch.tensor([_component_values(s, components) for s in sequences], dtype=torch.float64)
        found |= {"component_rewards": rewards, "components": tuple(components)}
        found["component_weights"] = tuple(components.values())
    for name in (name for name in NAMES if name in sequences[0]):
        chosen = [value for s in sequences for value, trained in zip(s[name], s["mask"], strict=True) if trained]
        found[name] = torch.zeros(mask.shape, dtype=torch.long)
        found[name][mask] = _numbered(chosen) if name == "state" else torch.tensor(chosen, dtype=torch.long)
    if "rollout_id" in sequences[0]:
        found["rollout_id"] = _numbered([_rollout(s) for s in sequences])
    return found


def _check_top(content: Any) -> list[str]:
    if not isinstance(content, dict):
        return [f"expected one JSON object, got {_kind(content)}"]
    if content.get("format") != FORMAT:
        return [f'"format" should be "{FORMAT}", got {json.dumps(content.get("format"))}']
    problems = []
    temperature = content.get("temperature", 1.0)
    if not _is_number(temperature) or temperature <= 0:
        problems.append(f'"temperature" should be a number > 0, got {_show(temperature)}')
    names = content.get("component_names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        problems.append(f'"component_names" should be a list of different strings, got {_show(names)}')
    if not isinstance(content.get("sequences"), list) or not content["sequences"]:
        problems.append('"sequences" should be a list with at least one sequence')
    return problems


def _check_sequence(sequence: Any) -> list[str]:
    if not isinstance(sequence, dict):
        return [f"expected an object, got {_kind(sequence)}"]
    # A field that is not known may be another tool's; only one that is
    # almost a known name is refused, since it would be ignored silently.
    problems = [f'"{name}" is missing' for name in REQUIRED if name not in sequence]
    for key in sequence.keys() - {*REQUIRED, *OPTIONAL}:
        near = difflib.get_close_matches(key, (*REQUIRED, *OPTIONAL), n=1, cutoff=0.8)
        problems += [f'"{key}" is not known; did you mean "{near[0]}"?'] if near else []
    for name, (fits, wanted) in _FORMS.items():
        if name in sequence and not fits(sequence[name]):
            problems.append(f'"{name}" should be {wanted}, got {_show(sequence[name])}')
        elif name in ("reward", "baseline", "bootstrap") and abs(sequence.get(name, 0)) > _FLOAT32:
            problems.append(f'"{name}" should be at most {_FLOAT32:.3g} either way, got {_show(sequence[name])}')
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
        fits, wanted = _ELEMENTS.get(name, _NUMBER)
        problems += [
            f'"{name}" at position {position} should be {wanted}, got {_show(value)}'
            for position, (value, chosen) in enumerate(zip(array, mask, strict=False))
            if chosen == 1 and not fits(value)
        ]
        problems += [
            f'"{name}" at position {position} should be at most {_FLOAT32:.3g} either way, got {_show(value)}'
            for position, (value, chosen) in enumerate(zip(array, mask, strict=False))
            if name in ("values", "step_rewards") and chosen == 1 and _is_number(value) and abs(value) > _FLOAT32
        ]
        problems += [
            f'"{name}" at position {position} should be a log-probability, at most 0, got {_show(value)}; is it a '
            "probability?"
            for position, (value, chosen) in enumerate(zip(array, mask, strict=False))
            if name in LOGPROBS and chosen == 1 and _is_number(value) and value > LARGEST_LOGPROB
        ]
    return problems


def _check_together(sequences: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    widest = max(len(sequence["mask"]) for sequence in sequences)
    # One long sequence among many short ones would be padded to hundreds of gigabytes.
    if widest * len(sequences) > _CELLS:
        problems.append(
            f"{len(sequences)} sequences padded to the longest, {widest} positions, are more than {_CELLS:,} numbers; "
            "record long and short sequences in different files"
        )
    for name in (name for name in OPTIONAL if name not in ("truncated", "proximal")):
        lacking = [number for number, sequence in enumerate(sequences) if name not in sequence]
        if 0 < len(lacking) < len(sequences):
            problems.append(f'sequence {lacking[0]}: "{name}" is missing, and other sequences have it')
    return problems


def _check_rollouts(sequences: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what segments of one rollout contradict, and turns that go back."""
    problems: list[str] = []
    rollouts: dict[Any, list[int]] = {}
    for number, sequence in enumerate(sequences):
        name = _rollout(sequence) if "rollout_id" in sequence else number
        rollouts.setdefault(name, []).append(number)
        turns = [turn for turn, chosen in zip(sequence.get("turn", ()), sequence["mask"], strict=False) if chosen]
        if turns != sorted(turns):
            problems.append(f'sequence {number}: "turn" goes back, and answers come one after the other')
    for numbers in rollouts.values():
        first, last = sequences[numbers[0]], numbers[-1]
        reward = first["reward"]
        differ = [n for n in numbers if sequences[n]["reward"] != reward]
        if differ:
            problems.append(
                f'sequence {differ[0]}: "reward" is {sequences[differ[0]]["reward"]:g} and that of sequence '
                f"{numbers[0]}, of the same rollout_id, {reward:g}; each segment carries the reward of the rollout"
            )
        # A row that is left out of the loss (mask_truncated) has no trained token, and what it earned is not there.
        if "step_rewards" in first and not differ and all(any(sequences[n]["mask"]) for n in numbers):
            steps = [zip(sequences[n]["step_rewards"], sequences[n]["mask"], strict=True) for n in numbers]
            total = math.fsum(x for pairs in steps for x, chosen in pairs if chosen)
            # Step rewards were float32 when they were recorded, and are added up in float64 here.
            if abs(total - reward) > _ROUNDING * max(1.0, abs(reward)):
                problems.append(
                    f'sequence {last}: "step_rewards" of trained tokens add up to {total:g}, and "reward" is {reward:g}'
                )
    return problems


def _check_components(content: Mapping[str, Any]) -> list[str]:
    given = content.get("component_weights", {})
    if not _are_numbers(given):
        return [f'"component_weights" should be an object of names and numbers, got {_show(given)}']
    components, problems = _components(content), []
    for number, sequence in enumerate(content["sequences"]):
        found = sequence.get("component_rewards", {})
        if isinstance(found, list) and len(found) != len(components):
            problems.append(
                f'sequence {number}: "component_rewards" has {len(found)} numbers, and there are {len(components)} '
                f"components: {', '.join(components)}"
            )
        elif isinstance(found, dict) and found.keys() != components.keys():
            names = ", ".join(sorted(found.keys() ^ components.keys()))
            problems.append(
                f'sequence {number}: "component_rewards" of sequence 0 and of this one are not the same: {names}; a '
                "missing reward is no 0"
            )
    fits = not given.keys() - components.keys() if isinstance(given, dict) else len(given) == len(components)
    if not fits:
        problems.append(f'"component_weights" are {_show(given)}, and the components {", ".join(components) or "none"}')
    return problems


def _rollout(sequence: Mapping[str, Any]) -> tuple[str, Any]:
    return str(sequence["prompt_id"]), sequence["rollout_id"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _is_name(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # An integer of JSON may have thousands of digits: isfinite raises for what no float holds.
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _are_numbers(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and all(_is_number(each) and abs(each) <= _FLOAT32 for each in values)


_Form = tuple[Callable[[Any], bool], str]
_NUMBER: _Form = (_is_number, "a finite number")
_FORMS: Mapping[str, _Form] = {
    "prompt_id": (_is_name, "a string"),
    "reward": _NUMBER,
    "baseline": _NUMBER,
    "bootstrap": _NUMBER,
    "role": (lambda value: isinstance(value, str), "a string"),
    "rollout_id": (_is_name, "a whole number or a string"),
    "component_rewards": (_are_numbers, "an object of names and finite numbers, or a list of these"),
    "truncated": (lambda value: isinstance(value, bool), "true or false"),
}
"""What holds of a field of a sequence, and how it is said."""
_ELEMENTS: Mapping[str, _Form] = {"state": (_is_name, "a whole number or a string"), "turn": (_is_count, "0, 1, ...")}
"""Likewise of an array's elements; others are numbers."""


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
