"""How each prompt of an evaluation was answered, as JSON lines: what two evaluations are paired by."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnomon.core.atomic_files import read_plain, write_durably
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.redaction import redacted
from gnomon.core.statistics import maj_at_k, pass_at_k
from gnomon.core.types import Group
from gnomon.records.jsonl import Warn, is_number, parsed, warn_on_stderr

_WRITERS = "a run writes them to evaluations/step-N.jsonl, `gnomon evaluate ... --out FOLDER` to FOLDER"
_MEASURE = re.compile(r"(pass|maj)@(\d+)")


def question_digest(text: str) -> str:
    """Return a digest of a question's text; the same question has the same one everywhere."""
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=6).hexdigest()


@dataclass(frozen=True)
class EvalRecord:
    """How one prompt was answered in one evaluation.

    Attributes:
        prompt_id: Id of the task.
        question: A digest of its text; the same question has the same one everywhere.
        scores: First part of the reward of each sample that it applies to, in the order of sampling.
        answers: Answer of each of these, in the verifier's canonical form; None where it gave no answer.
        lengths: Number of tokens of every sample.
        truncated: Number of samples that their budget cut off.
        errors: Number of samples that could not be graded.
    """

    prompt_id: str
    question: str
    scores: tuple[float, ...]
    answers: tuple[str | None, ...]
    lengths: tuple[int, ...]
    truncated: int = 0
    errors: int = 0

    @classmethod
    def of(cls, group: Group, part: str) -> "EvalRecord":
        """Return how a graded group answered; ``part`` names the part of the reward that is its score."""
        # Lengths are of all samples: an error is no zero, and neither is a part that does not apply (TRL's None).
        scored = [r for r in group.rollouts if r.grade.error is None and part in r.grade.parts]
        return cls(
            prompt_id=group.task.id,
            question=question_digest(group.task.text),
            scores=tuple(r.grade.parts[part] for r in scored),
            answers=tuple(r.grade.answer for r in scored),
            lengths=tuple(r.length for r in group.rollouts),
            truncated=sum(r.is_truncated for r in group.rollouts),
            errors=sum(r.grade.error is not None for r in group.rollouts),
        )

    @property
    def samples(self) -> int:
        """Samples that were drawn, errors among them."""
        return len(self.lengths)

    @property
    def right(self) -> int:
        """Samples whose score is 1."""
        return sum(score == 1.0 for score in self.scores)

    @property
    def is_binary(self) -> bool:
        """Whether every score is 0 or 1, so that pass@k and maj@k mean something."""
        return all(score in (0.0, 1.0) for score in self.scores)

    def measure(self, name: str) -> float | None:
        """Return one number of this prompt; None where it has too few graded samples, or scores that are not 0 or 1.

        Args:
            name: "avg", the mean score; "pass@K" and "maj@K", unbiased over all choices of K of the samples; "tokens",
                the mean length; "truncated", the share that was cut off.

        Raises:
            ConfigError: The name is another one.
        """
        if name == "avg":
            return sum(self.scores) / len(self.scores) if self.scores else None
        if name in ("tokens", "truncated"):
            total = sum(self.lengths) if name == "tokens" else self.truncated
            return total / len(self.lengths) if self.lengths else None
        found = _MEASURE.fullmatch(name)
        if found is None:
            raise ConfigError(f"a measure is avg, pass@K, maj@K, tokens or truncated, got '{name}'")
        k = int(found[2])
        if k < 1:
            raise ConfigError(f"k must be at least 1, got '{name}'")
        # The unbiased estimators choose k of n samples, so n must be at least k, and each must be right or wrong.
        if not 1 <= k <= len(self.scores) or not self.is_binary:
            return None
        if found[1] == "pass":
            return pass_at_k(len(self.scores), self.right, k)
        return maj_at_k(self.answers, self.scores, k)


@dataclass
class AnswerLog:
    """Writes ``evaluations/step-000012.jsonl``: one file an evaluation, one line a prompt, whole or absent.

    A file that cannot be written is counted and warned of once; it never ends a run.
    """

    directory: Path
    warn: Warn = warn_on_stderr
    lost: int = 0

    def write(self, step: int, rows: Sequence[EvalRecord]) -> None:
        """Write the answers of an evaluation after ``step`` steps."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_answered(self.path(step), rows)
        except OSError as error:
            if self.lost == 0:
                self.warn(f"{self.directory} cannot be written, the run goes on without its answers: {error}")
            self.lost += 1

    def path(self, step: int) -> Path:
        """Return the file of the evaluation after ``step`` steps."""
        return self.directory / f"step-{step:06d}.jsonl"


def write_answered(path: Path, rows: Sequence[EvalRecord]) -> None:
    """Write one JSON object a line, all or nothing.

    Raises:
        OSError: The file cannot be written.
    """
    lines = (
        json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in redacted([asdict(row) for row in rows])
    )
    write_durably(path, "".join(lines).encode(errors="backslashreplace"), is_synced=False)


def read_answered(path: Path, warn: Warn = warn_on_stderr) -> tuple[EvalRecord, ...]:
    """Return what `write_answered` wrote; damaged lines are passed over, and ``warn`` is told how many.

    A line is damaged that is torn, or no answered prompt: a number that is not finite, lists of unequal lengths.

    Raises:
        DatasetError: There is no such file, or no line of it is an answered prompt.
    """
    try:
        lines = [line for line in read_plain(path).split(b"\n") if line.strip()]
    except FileNotFoundError as error:
        raise DatasetError(f"there is no file {path} of answered prompts; {_WRITERS}") from error
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error
    found = tuple(row for line in lines if (row := _answered(parsed(line) or {})) is not None)
    if not found:
        raise DatasetError(f"{path} {_flaw(lines)}; {_WRITERS}")
    if len(found) < len(lines):
        warn(f"{path}: {len(lines) - len(found)} of {len(lines)} lines are damaged and left out")
    return found


def answered_after(directory: Path, step: int) -> tuple[EvalRecord, ...]:
    """Return what a run's evaluation after ``step`` steps wrote of each prompt; nothing where it cannot be read."""
    try:
        return read_answered(AnswerLog(directory).path(step))
    except DatasetError:
        return ()


def _flaw(lines: Sequence[bytes]) -> str:
    """Return why a file without an answered prompt has none."""
    try:
        b"\n".join(lines).decode()
    except UnicodeDecodeError:
        return "is no text in UTF-8, so it holds no answered prompts"
    return "holds no answered prompts"


def _answered(line: Mapping[str, Any]) -> EvalRecord | None:
    try:
        scores, answers, lengths = (tuple(line[name]) for name in ("scores", "answers", "lengths"))
        row = EvalRecord(**{**line, "scores": scores, "answers": answers, "lengths": lengths})
    except (TypeError, KeyError):
        return None
    is_sound = (
        isinstance(row.prompt_id, str)
        and isinstance(row.question, str)
        and all(is_number(score) for score in scores)
        and all(answer is None or isinstance(answer, str) for answer in answers)
        and all(type(count) is int and count >= 0 for count in (*lengths, row.truncated, row.errors))
        and len(scores) == len(answers)
        and len(lengths) >= len(scores) + row.errors
    )
    return row if is_sound else None
