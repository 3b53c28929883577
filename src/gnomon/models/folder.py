"""The files of a model besides its weights: generation config, other files of its folder, and its chat template.

A chat template is foreign code, so rendering has limits on executed lines, output, time and memory.
"""

import copy
import json
import random
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from jinja2 import TemplateError, TemplateSyntaxError

from gnomon.core.atomic_files import real_path
from gnomon.core.errors import ConfigError, ModelError
from gnomon.core.sections import DATE
from gnomon.core.types import Message
from gnomon.models.token_strings import first_line, parsed
from gnomon.models.weights_check import no_report

# A model's generation config, so that what transformers reads is also what it writes.

_NAMED = re.compile(r"`(\w+)`")
_LISTED = re.compile(r"^- `(\w+)`:", re.MULTILINE)
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def savable(generation_config: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a generation config that transformers can save, and the fields that were left out.

    transformers loads a temperature together with do_sample = false but refuses to save both. The fields that its
    message names are left out; token ids stay.
    """
    kept, dropped = copy.deepcopy(generation_config), list[str]()
    # transformers names one group of wrong fields at a time, so it is asked until it has none left.
    while (said := _refusal(kept)) is not None:
        named = [
            name for name in _LISTED.findall(said) or _NAMED.findall(said) if getattr(kept, name, None) is not None
        ]
        # A number of answers needs do_sample, which is not at fault where both are named.
        wrong = [name for name in named if name != "do_sample"] or named
        # A refusal that names no field: only token ids are kept, which decide where an answer ends.
        if not wrong:
            ids = {name: value for name in _IDS if (value := getattr(kept, name, None)) is not None}
            return type(kept)(**ids), tuple(sorted(vars(kept).keys() - ids.keys()))
        for name in wrong:
            dropped.append(name)
            if hasattr(type(kept)(), name):
                setattr(kept, name, None)
            else:
                delattr(kept, name)
    return kept, tuple(dropped)


def moved(config: Any, generation_config: Any) -> None:
    """Move generation settings from a model's config to its generation config, unless the latter has them already."""
    for name, value in config._get_generation_parameters().items():
        delattr(config, name)
        if getattr(generation_config, name, None) is None:
            setattr(generation_config, name, value)


def _refusal(generation_config: Any) -> str | None:
    try:
        with no_report():
            generation_config.validate(strict=True)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


# What lies beside a model's weights in its folder, and goes along into every checkpoint of it.

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
    """Other files of a model's folder by path, as they were when the run began.

    ``left_out`` lists files that are too large, and links that lead out of the folder.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the files that ``folder`` does not have yet."""
        for name, content in self.files.items():
            place = folder / name
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)


def check_json(path: Path) -> None:
    """Check a JSON file of a model's folder, where there is one: what transformers reads is what stands there.

    Raises:
        ModelError: If it begins with a byte order mark, is no object of JSON, has a field twice, or a NaN.
    """
    if not path.is_file():
        return

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made and made[name] != value:
                raise ModelError(f"'{path}' has {name} twice, {made[name]!r} and {value!r}; remove the wrong one")
            # NaN is the only value that differs from itself; Python's JSON reader accepts it, though JSON has none.
            if value != value:
                raise ModelError(f"'{path}' has {name} = NaN; write a number")
            made[name] = value
        return made

    text = path.read_bytes()
    if text.startswith(b"\xef\xbb\xbf"):
        raise ModelError(f"'{path}' begins with a byte order mark, which transformers does not read; save it without")
    try:
        made = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'{path}' is not JSON: {first_line(error)}; correct it, or copy it again") from error
    if not isinstance(made, dict):
        raise ModelError(f"'{path}' holds one {type(made).__name__}, and an object is asked; copy it again")


def belongings_of(folder: Path | None, with_code: bool = False) -> Belongings:
    """Return the files of ``folder`` besides config, weights and tokenizer; empty without a folder.

    These are processor files, chat templates, vocabularies, licenses and, with ``with_code``, the model's Python files.
    Hidden files, files with names of secrets, weights and READMEs are left out.

    Raises:
        ModelError: If a file cannot be read.
    """
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    room = _MOST_BYTES
    for path in () if folder is None else _candidates(folder, with_code):
        name = path.relative_to(folder).as_posix() if folder is not None else path.name
        with parsed(f"'{path}' cannot be read"):
            # A link out of the folder could carry a file of this machine into a checkpoint that is published.
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
    """Whether a file is in the folder, or a link into the folder or into the model's part of the hub cache."""
    if folder is None:
        return False
    root = real_path(folder)
    # The hub's cache has links from snapshots/COMMIT to blobs.
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    return any(real_path(path).is_relative_to(place) for place in allowed)


MOST_LINES = 1_000_000
"""Lines of a template that one rendering may execute; a long conversation takes some ten thousand."""
MOST_CHARACTERS = 10_000_000
"""Characters that one rendering may write, or ten times what it was given."""
# Limits of a rendering: seconds, further bytes of memory at the first one, the largest integer in a template, and the
# lines between two looks at the clock.
_SECONDS = 10.0
_ROOM = 2**30
_LARGEST = 1_000_000
_LOOK = 1024
_tried = set[int]()
CLOCK, DRAWS = "strftime_now", ("random", "lipsum")
"""What reads the clock in a chat template, and what draws at random."""


class EndlessTemplate(Exception):
    """A template executed more than `MOST_LINES` lines, or ran too long."""


def render(
    backend: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    switches: Mapping[str, Any] | None = None,
    begins_answer: bool = True,
    date: str = DATE,
) -> str:
    """Render ``messages`` with the tokenizer's chat template: the same text for the same arguments, always.

    A template that reads the clock reads midnight of ``date``, and one that draws at random draws by its arguments.
    The first rendering of a template may use one gibibyte of memory, because no model is loaded yet.

    Args:
        backend: The transformers tokenizer.
        messages: The conversation.
        tools: JSON schemas.
        switches: Further variables of the template.
        begins_answer: End where the model's answer begins.
        date: The day, as YYYY-MM-DD.

    Raises:
        ConfigError: If the template is invalid, refuses the messages, does not end, or exceeds the memory.
    """
    plain = [dict(message) for message in messages]
    given = {**(switches or {}), "tools": [dict(tool) for tool in tools] or None}
    roles = [message.get("role") for message in plain]
    text = str(backend.chat_template)
    template = hash(text)
    if CLOCK in text:
        given[CLOCK] = datetime.fromisoformat(date).strftime
    is_drawn = any(name in text for name in DRAWS)
    try:
        with (
            # The limit is of the whole process, so it can hold only before a model is loaded; a template that passed
            # once is trusted.
            nullcontext() if template in _tried else _little_memory(),
            _same_draws(str((plain, tools, switches))) if is_drawn else nullcontext(),
        ):
            said = _within_bounds(
                lambda: str(
                    backend.apply_chat_template(plain, tokenize=False, add_generation_prompt=begins_answer, **given)
                )
            )
        _tried.add(template)
        if len(said) > max(MOST_CHARACTERS, 10 * len(str((plain, given)))):
            raise MemoryError
        return said
    except MemoryError as error:
        raise ConfigError(
            f"the model's chat template writes more than {MOST_CHARACTERS:,} characters, or fills {_ROOM >> 30} GiB of "
            f"memory, for {len(plain)} messages; correct it (chat_template.jinja or tokenizer_config.json)"
        ) from error
    except EndlessTemplate as error:
        raise ConfigError(
            f"the model's chat template does not end: more than {MOST_LINES:,} of its lines, or {_SECONDS:g} s, for "
            f"{len(plain)} messages; correct it (chat_template.jinja or tokenizer_config.json)"
        ) from error
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the model's chat template has a mistake in line {error.lineno}: {error.message}; correct it "
            "(chat_template.jinja or tokenizer_config.json)"
        ) from error
    except TemplateError as error:
        # raise_exception in a template raises a plain TemplateError; its subclasses are faults of the template
        # itself.
        if type(error) is not TemplateError:
            raise _failed(roles, error) from error
        raise ConfigError(
            f"the model's chat template refuses messages with roles {roles}: {error}; {_way_out(roles)}"
        ) from error
    except Exception as error:
        # A template is foreign code and can raise any error.
        raise _failed(roles, error) from error


def _failed(roles: Sequence[Any], error: Exception) -> ConfigError:
    return ConfigError(
        f"the model's chat template fails for messages with roles {roles}: {type(error).__name__}: {error}; "
        "correct it (chat_template.jinja or tokenizer_config.json), or give the messages as it wants them"
    )


def _way_out(roles: Sequence[Any]) -> str:
    """Return what to do about messages that a template refuses."""
    if roles and roles[0] in ("system", "developer"):
        return "put the text of the first message into the user's message (and remove `system`, if it is set)"
    return "give the messages in an order that it takes, or correct it (chat_template.jinja or tokenizer_config.json)"


@contextmanager
def _same_draws(arguments: str) -> Iterator[None]:
    """Seed Python's generator by ``arguments`` inside the block, and leave it as it was."""
    before = random.getstate()
    random.seed(arguments)
    try:
        yield
    finally:
        random.setstate(before)


def check_template(backend: Any) -> None:
    """Refuse a chat template with an expression that computes without bound, before the template is compiled.

    Raises:
        ConfigError: For a power, and for an integer above a million.
    """
    template = backend.chat_template
    for text in template.values() if isinstance(template, Mapping) else [template]:
        # jinja computes constant expressions while it compiles, where no limit holds: 9**9**9 would never end.
        for part in _parts(str(text)):
            is_large = part[1] == "integer" and int(part[2].replace("_", ""), 0) > _LARGEST
            if part[1:] == ("operator", "**") or is_large:
                raise ConfigError(
                    f"the model's chat template has {part[2][:20]!r} in line {part[0]}, which may not end: no power "
                    f"and no number above {_LARGEST:,} is taken; correct it (chat_template.jinja or "
                    "tokenizer_config.json)"
                )


def names_switch(backend: Any, name: str, has_tools: bool) -> bool:
    """Whether the chat template reads this variable."""
    template = backend.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use" if has_tools and "tool_use" in template else "default", "")
    return any(part[1:] == ("name", name) for part in _parts(str(template)))


def _parts(template: str) -> list[tuple[int, str, str]]:
    """Return the template's parts as (line, kind, text); empty for an invalid template."""
    try:
        return list(jinja2.Environment().lex(template))
    except TemplateError:
        return []


def _within_bounds(work: Callable[[], str]) -> str:
    """Return the result of ``work``; count the executed lines of templates, which jinja compiles to Python.

    Raises:
        EndlessTemplate: If there are too many.
    """
    lines, began = 0, time.monotonic()

    def line(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines > MOST_LINES or (lines % _LOOK == 0 and time.monotonic() - began > _SECONDS):
            raise EndlessTemplate
        return line

    def call(frame: FrameType, event: str, given: Any) -> Any:
        # Only lines of templates are traced; tracing transformers' own code would make a rendering many times slower.
        return line if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        return work()
    finally:
        sys.settrace(before)


@contextmanager
def _little_memory() -> Iterator[None]:
    """Limit this process to `_ROOM` further bytes of memory inside the block, on Linux."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # The first number of statm is the size of the address space in pages, which is what RLIMIT_AS bounds.
    bound = int(sizes.read_text().split()[0]) * resource.getpagesize() + _ROOM
    bound = bound if soft == resource.RLIM_INFINITY else min(bound, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
