"""Sentences for people: counts with their nouns, sizes, and templates of sentences (``*.j2``) beside the code."""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def many(count: int, what: str, several: str = "") -> str:
    """Return a count and its noun.

    >>> many(1, "step"), many(2000, "batch", "batches")
    ('1 step', '2,000 batches')
    """
    return f"{count:,} {what if count == 1 else several or f'{what}s'}"


def size_in_words(count: int) -> str:
    """Return bytes as a person says them.

    >>> size_in_words(3 * 2**30), size_in_words(1)
    ('3.0 GiB', '1 MiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"


def sentences(file: str, part: str, **known: Any) -> list[str]:
    """Return what a part of a template says.

    Args:
        file: The template, as a path in the package.
        part: A macro of it: each line is a sentence.
        known: What the template's names stand for.
    """
    module: Any = template(file).make_module(known)
    return [line for line in getattr(module, part)().split("\n") if line]


def template(file: str) -> "Template":
    """Return a template of the package, which has `many`, `size_in_words`, ``repr`` and ``kind`` beside its context."""
    return _templates().get_template(file)


@cache
def _templates() -> "Environment":
    # Imported late: most commands print no such sentence. StrictUndefined
    # makes a misspelt name an error instead of an empty word.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(loader=PackageLoader("gnomon", ""), undefined=StrictUndefined, trim_blocks=True)
    made.globals.update(many=many, size_in_words=size_in_words, kind=_kind, repr=repr)
    return made


def _kind(value: object) -> str:
    return type(value).__name__ if type(value).__module__.startswith("gnomon.") else ""
