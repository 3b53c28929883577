"""Which text of an answer is its program, and what of it the cases can call."""

import ast
import builtins
import functools
import re
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Fenced blocks of an answer, as people write them, found in one pass over its lines.

_OPENING = re.compile(r"([ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")
_BEHIND_TEXT = re.compile(r"()(`{3,})[ \t]*(py(?:thon)?[\d.]*)[ \t]*", re.IGNORECASE)
_PYTHON = re.compile(r"(?:i?py(?:thon)?[\d.]*)?", re.IGNORECASE)
_TEXTS = ("markdown", "md")
_QUOTES = re.compile(r"\\.|'''|\"\"\"|'|\"|#")
# Unclosed triple quotes that a text may have before quotes are
# ignored: each one costs a pass over the rest of the text.
_TRIED = 8


@dataclass(frozen=True)
class FencedBlock:
    """A fenced block.

    Attributes:
        language: The language that its first line names, "" for none.
        body: Its text, the fence's own indent taken off.
    """

    language: str
    body: str

    @property
    def is_python(self) -> bool:
        """Whether it is Python's or nobody's."""
        return _PYTHON.fullmatch(self.language) is not None


@dataclass
class _Scan:
    """What a pass remembers so that it never looks at the rest of a text twice for one reason.

    Attributes:
        open: By character, the shortest fence that nothing closes.
        trust: How often text in triple quotes may turn out to have no end before quotes are no longer looked at.
    """

    lines: Sequence[str]
    open: dict[str, int] = field(default_factory=dict)
    trust: int = _TRIED

    def closing(self, start: int, fence: str) -> int | None:
        """Return the line that closes the fence; a fence within a triple-quoted text closes nothing."""
        first, quote = None, ""
        for number in range(start, len(self.lines)):
            line = self.lines[number]
            # A line that opens a fence with a language before any closing fence means that this one was never closed.
            if fence[0] not in line or not _is_fence(line, fence):
                opened = None if quote or line.lstrip()[:3] != fence[:3] else _opening(line)
                if opened is not None and opened[2] and first is None:
                    return None
                quote = _quoted(line, quote) if self.trust else ""
            elif not quote:
                return number
            elif first is None:
                first = number
        # Nothing closes a fence of this length, so no longer one of the same character
        # is closed by any line either; later openings are skipped without a scan.
        if first is None:
            self.open[fence[0]] = len(fence)
        else:
            self.trust -= 1
        return first


def blocks(text: str) -> list[FencedBlock]:
    r"""Return the fenced blocks that are closed, in their order.

    Fences are of backticks or tildes, at any indent, also quoted, as an item of a list, or behind text that ends in
    its line.

    >>> [block.body for block in blocks("1. So:\n\n   ~~~py\n   x = 1\n   ~~~\n")]
    ['x = 1\n']
    """
    lines = text.replace("\r\n", "\n").split("\n")
    scan, found, number = _Scan(lines), [], 0
    while number < len(lines):
        opened = _opening(lines[number])
        number += 1
        # A block of markdown is looked into: models put the program inside, with fences of its own.
        if opened is None or opened[2].lower() in _TEXTS or len(opened[1]) >= scan.open.get(opened[1][0], 1 << 30):
            continue
        indent, fence, language = opened
        end = scan.closing(number, fence)
        if end is not None:
            inside = lines[number:end]
            # In a quotation every line has its mark, which is no part of the program.
            if lines[number - 1].lstrip().startswith(">") and all(line.lstrip()[:1] in ("", ">") for line in inside):
                inside = [_CITED.sub("", line) for line in inside]
            body = "".join(_shifted(line, len(indent)) + "\n" for line in inside)
            found.append(FencedBlock(language.strip("{}.").lower(), body))
            number = end + 1
    return found


def has_fence(text: str) -> bool:
    """Whether a line of the text begins with a fence, closed or not."""
    return any(_opening(line) is not None for line in text.split("\n"))


def _opening(line: str) -> tuple[str, str, str] | None:
    found = _OPENING.fullmatch(line)
    if found is None and "```" in line:
        found = _BEHIND_TEXT.fullmatch(line, line.rindex("```"))
    return None if found is None else (found[1], found[2], found[3])


def _is_fence(line: str, fence: str) -> bool:
    bare = line.strip(" \t>")
    return len(bare) >= len(fence) and not bare.strip(fence[0])


def _quoted(line: str, quote: str) -> str:
    """Return the triple quote that is open behind the line, "" for none."""
    # A character-by-character state machine over quotes, escapes
    # and comments; only triple quotes go on in the next line.
    for mark in _QUOTES.findall(line):
        if not quote:
            if mark == "#":
                return ""
            quote = "" if mark[0] == "\\" else mark
        elif mark == quote or mark[0] == quote:
            quote = ""
    return quote if len(quote) == 3 else ""


def _shifted(line: str, count: int) -> str:
    indent = len(line) - len(line.lstrip(" \t"))
    return line[min(indent, count) :]


_READERS = frozenset({"input", "stdin", "open", "fileinput", "readline", "readlines"})
_FLAWS = (SyntaxError, ValueError, RecursionError, MemoryError)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_THOUGHT = "</think>"
_CITED = re.compile(r"^\s*> ?")
_ANSWER_TAG = re.compile("</?answer>")
# In brackets, as in the prompts of MBPP and Code Llama; states[DONE] is a part of a program.
_BRACKET_TAG = re.compile(r"^\[(?:PYTHON|BEGIN|DONE)\]|\[/PYTHON\]", re.MULTILINE)
_BEGINNINGS = ("def ", "class ", "import ", "from ", "@", "async def ")


@dataclass(frozen=True)
class Piece:
    """A text of Python.

    Attributes:
        tree: Its syntax tree, None where it is no Python.
    """

    text: str
    tree: ast.Module | None
    language: str = ""

    @functools.cached_property
    def defines(self) -> frozenset[str]:
        """Names that it binds at its outermost level, and the methods of a class ``Solution``."""
        return frozenset() if self.tree is None else frozenset(_bound(self.tree.body))

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """Names that it reads and nowhere binds, Python's own left out."""
        return frozenset() if self.tree is None else free_names(self.tree)

    @functools.cached_property
    def reads(self) -> bool:
        """Whether it seems to read its input."""
        names = {name for node in ast.walk(self.tree or ast.Module([], [])) for name in _named(node)}
        return bool(_READERS & names)

    @property
    def acts(self) -> bool:
        """Whether anything in it calls, defines or imports something; a sample of output does not."""
        acting = (ast.Call, ast.Import, ast.ImportFrom, *SCOPES)
        return self.tree is not None and any(isinstance(node, acting) for node in ast.walk(self.tree))


def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree of a text, None for what is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model's escapes
        try:
            return ast.parse(text)
        except _FLAWS:
            return None


def flaw_of(text: str) -> str:
    """Return why a text is no Python."""
    try:
        ast.parse(text)
    except _FLAWS as error:
        return str(error)
    return ""


def free_names(tree: ast.AST) -> frozenset[str]:
    """Return the names that a tree reads and nowhere binds, Python's own left out.

    >>> sorted(free_names(ast.parse("def f(x: List[int]): return gcd(x, abs(y))")))
    ['List', 'gcd', 'y']
    """
    # Scopes are ignored: a name that is bound anywhere counts as bound. The prelude
    # then imports too little at worst where a program shadows a name in one function.
    read: set[str] = set()
    made = set(vars(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, SCOPES):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            made.add(node.name)
    return frozenset(read - made)


def last_program(text: str, names: Collection[str] = (), reads: bool = False) -> str | None:
    """Return the program of an answer, None where there is none.

    Args:
        names: Names that the cases call; the program is the last block that defines all of it, else all blocks together
            where they do.
        reads: Whether the cases write to standard input; the program is then the last block that reads. Blocks before
            it come along where it needs what they define. Python's blocks go before those of no language, what stands
            behind a thought before the thought, and an answer without any fence is a program if it is Python from some
            line on.

    >>> last_program("First:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    # A program within the thought is a draft; it counts only where nothing follows the thought.
    answer = text.rpartition(_THOUGHT)[2]
    found = _python(answer)
    if not found and len(answer) < len(text):
        answer, found = text, _python(text)
    if not found:
        return None if has_fence(answer) else _unfenced(answer, names)
    # Blocks of sample output are left out: they may parse as Python and do nothing.
    sound = [piece for piece in found if piece.tree is not None and piece.acts]
    if not sound:
        # Nothing parses. The last block is run all the same, and its syntax error is the program's.
        return found[-1].text
    if names:
        return _defining(sound, names)
    readers = [piece for piece in sound if piece.reads] if reads else []
    labelled = [piece for piece in sound if piece.language]
    chosen = (readers or labelled or sound)[-1]
    if readers and labelled and not chosen.language:
        chosen = next((piece for piece in reversed(readers) if piece.language), chosen)
    return _with_needs(sound, sound.index(chosen))


def _python(text: str) -> list[Piece]:
    return [_piece(block) for block in blocks(text) if block.is_python and block.body.strip()]


def _piece(block: FencedBlock) -> Piece:
    tree = parsed(block.body)
    if tree is None:
        flat = textwrap.dedent(block.body)
        tree = parsed(flat) if flat != block.body else None
        return Piece(block.body if tree is None else flat, tree, block.language)
    return Piece(block.body, tree, block.language)


def _defining(sound: Sequence[Piece], names: Collection[str]) -> str:
    """Return the last piece that defines what is called, with what it needs; all of them where it takes them all."""
    wanted = set(names)
    for place in reversed(range(len(sound))):
        if wanted <= sound[place].defines:
            return _with_needs(sound, place)
    if wanted <= frozenset().union(*(piece.defines for piece in sound)):
        return "\n".join(piece.text for piece in sound)
    partly = [place for place, piece in enumerate(sound) if wanted & piece.defines]
    labelled = [place for place, piece in enumerate(sound) if piece.language]
    return _with_needs(sound, (partly or labelled or [len(sound) - 1])[-1])


def _with_needs(sound: Sequence[Piece], place: int) -> str:
    """Return a piece behind those others that define what it needs, in their order."""
    chosen, needs = [place], set(sound[place].needs)
    # From the end, so that of two blocks that define one name the later draft is taken.
    for other in reversed(range(len(sound))):
        useful = needs & sound[other].defines if other != place else None
        if useful:
            chosen.append(other)
            needs = (needs - useful) | (sound[other].needs - sound[place].defines)
    before = sorted(chosen[1:])
    return "\n".join(sound[number].text for number in (*before, place))


def _unfenced(text: str, names: Collection[str]) -> str | None:
    """Return the text from its first line that begins as Python does, up to where it stops being Python."""
    lines = _BRACKET_TAG.sub("\n", text.replace("\r\n", "\n")).split("\n")
    # The first line, or the first line that begins as Python does: more starts would cost a parse each.
    starts = [0, *(number for number, line in enumerate(lines) if line.startswith(_BEGINNINGS))][:2]
    for start in dict.fromkeys(starts):
        rest = "\n".join(lines[start:])
        for some in (rest, up_to_flaw(rest)):
            piece = Piece(some, parsed(some))
            if piece.acts and set(names) <= piece.defines:
                return some
    return _unfenced(bare, names) if (bare := _ANSWER_TAG.sub("\n", text)) != text else None


def up_to_flaw(text: str) -> str:
    """Return a text up to the line where it stops being Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except SyntaxError as error:
        return "\n".join(text.split("\n")[: max(0, (error.lineno or 1) - 1)])
    except _FLAWS:
        return ""
    return text


def _bound(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, SCOPES):
            yield statement.name
            if statement.name == "Solution" and isinstance(statement, ast.ClassDef):
                yield from _bound(statement.body)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id
                elif isinstance(node, SCOPES):
                    yield node.name


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr


def begun(columns: Mapping[str, Any], prompt: str) -> Piece | None:
    """Return the Python that a row gives to begin with: its starter code, or its prompt."""
    for text in (columns.get("starter_code"), columns.get("prompt"), prompt):
        if not isinstance(text, str) or not ("def " in text or "import " in text):
            continue
        # A signature without a body does not parse, so a body of ``pass`` is tried behind it.
        for some in (text, *(block.body for block in blocks(text) if block.is_python)):
            for whole in (some, some.rstrip() + "\n" + " " * inner_indent(some) + "pass\n"):
                piece = Piece(some, parsed(whole))
                if piece.tree is not None and piece.defines:
                    return piece
    return None


def inner_indent(text: str) -> int:
    """Return how far the body of a text's last function is indented."""
    heads = [line for line in text.split("\n") if line.lstrip().startswith(("def ", "async def "))]
    return 4 if not heads else len(heads[-1]) - len(heads[-1].lstrip()) + 4
