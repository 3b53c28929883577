"""What lies beside a model's weights in its folder, and goes along into every checkpoint of it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gnomon.models.parsed import parsed

_MOST_BYTES, _MOST_FILES = 64 << 20, 256
_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab", ".bpe")
_FOLDERS = ("additional_chat_templates",)
# Weights and their indices, what trainers and gnomon leave, and what is about the former model alone.
_PASSED_OVER = re.compile(
    r"\.index\.json$|^(adapter_config|trainer_state|training_args|optimizer|scheduler|manifest|gnomon|all_results|"
    r"train_results|eval_results|requirements)\b|^readme|^model_index\.json$",
    re.IGNORECASE,
)
_SECRET = re.compile(r"secret|credential|password|passwd|api[_-]?key|^\.|^tokens?\.(json|txt)$|id_rsa", re.IGNORECASE)
_LEGAL = re.compile(r"^(licen[cs]e|notice|use_policy)(\.\w+)?$", re.IGNORECASE)


@dataclass(frozen=True)
class Belongings:
    """Files of a model's folder by their path in it, as they were when the run began.

    left_out: those that would belong to them and are too large, or links that lead out of the folder.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write those that are not in ``folder`` yet: what model and tokenizer wrote themselves stays."""
        for name, content in self.files.items():
            place = folder / name
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)


def belongings_of(folder: Path | None, with_code: bool = False) -> Belongings:
    """Return what belongs to the model in ``folder`` besides config, weights and tokenizer; of no folder, nothing.

    Those are processor files, chat templates, vocabularies, licenses and, with_code, the model's own Python files. Of
    hidden files, files that are named like secrets, weights and READMEs none is taken.
    Raises: ModelError when one cannot be read.
    """
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    room = _MOST_BYTES
    for path in () if folder is None else _candidates(folder, with_code):
        name = path.relative_to(folder).as_posix() if folder is not None else path.name
        with parsed(f"'{path}' cannot be read"):
            if not _stays_inside(path, folder) or path.stat().st_size > room or len(files) == _MOST_FILES:
                left_out.append(name)
                continue
            files[name] = path.read_bytes()
            room -= len(files[name])
    return Belongings(files, tuple(left_out))


def _candidates(folder: Path, with_code: bool) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and _is_carried(path.name):
            yield path
    for name in _FOLDERS:
        yield from (path for path in sorted((folder / name).glob("*.jinja")) if path.is_file())
    if with_code:
        yield from (path for path in sorted(folder.rglob("*.py")) if path.is_file() and not _SECRET.search(path.name))


def _is_carried(name: str) -> bool:
    if _SECRET.search(name) or _PASSED_OVER.search(name):
        return False
    return name.endswith(_SUFFIXES) or _LEGAL.match(name) is not None


def _stays_inside(path: Path, folder: Path | None) -> bool:
    """Whether a file is in the folder, or a link to one there or in the same model's part of the hub cache."""
    if folder is None:
        return False
    root = folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    return any(path.resolve().is_relative_to(place) for place in allowed)
