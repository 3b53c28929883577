"""Secrets taken out of text before it is written or shown."""

import base64
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

from gnomon.core.errors import ConfigError

SHORTEST = 8
# What a part of a name between underscores, without digits at its end, is, ends with or holds when it says "secret".
_WORD = re.compile(
    r"KEYS?|PAT|CRED|(?:O|BASIC)?AUTH|AUTHORIZATION"
    r"|\w*(?:API|ACCESS|AUTH|PRIV|PRIVATE|SECRET|SIGN|SIGNING|ENCRYPTION|MASTER|ACCOUNT|SSH|PASS)KEYS?"
    r"|(?!\w*(?:BY|COM|TRES|SUR|OVER|UNDER|ASK)PASS)\w*PASS|\w*(?:PWD|CREDS|DSN|COOKIES?)"
    r"|\w*(?:PASSWORD|PASSWD|PASSPHRASE|PASSCODE|CREDENTIAL|SECRET|JWT|BEARER|WEBHOOK|MNEMONIC)\w*"
    r"|\w*TOKEN(?!I[SZ])\w*"
)
# Two parts that say it together, whatever each alone may mean.
_STRONG = re.compile(r"(?:API|ACCESS|AUTH|PRIVATE|SECRET|SIGNING|ENCRYPTION|MASTER|ACCOUNT|BEARER)_?(?:KEY|TOKEN)")
_PLAIN = {int, float, bool, type(None)}
_PHRASE = re.compile(r"CONN(?:ECTION)?_?STR(?:ING)?(?![A-Z])")
# The shell's own folders.
_FOLDERS = {"PWD", "OLDPWD"}
# Parts of a name that say "secret" in some programs, and in others a column, a mark of a tokenizer or a count.
_ODD = re.compile(r"\w*(?<!API)(?<!ACCESS)(?<!AUTH)(?<!SECRET)(?<!PRIV)(?<!PRIVATE)KEYS?|\w*TOKENS?|PAT|CRED")
# What such a name holds when it means no secret: words, a path, a number, a mark as of a tokenizer.
_ORDINARY = re.compile(
    r"[A-Za-z]{1,16}(?:[-_./:, ]+[A-Za-z]{1,16}){0,7}|(?:~|\.{1,2})?(?:/[\w.@+ -]{1,64}){2,}/?|[-+\d.,_: eE]+"
    r"|<[^<>]*>|\[[^\[\]]*\]"
)
_FEW = 3
"""Different characters that a secret has at least."""
# Fields whose values are gnomon's own words.
_OWN_WORDS = {"stop", "ended_by", "severity", "rule", "not_finite", "device"}
_PRIVATE = "-----BEGIN "
_SETTINGS = ("api_key", "apikey", "access_key", "access_token", "auth_token", "secret", "password", "passwd")
# A name and a password before a host; and the forms that providers give to their keys.
# One slash is enough, for a path has no more; a password may hold "@" itself.
_LOGIN = r"""(:/{1,2})[^/\s:@]*:([^/\s@]+(?:@[^/\s@"'<>,;()]+)*)(?=@)"""
_ADDRESS = re.compile(_LOGIN)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|AKIA[0-9A-Z]{16}|AIza[A-Za-z0-9_-]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})"
)
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


# What a break between two lines, or a space, becomes where text is joined, quoted or escaped; nothing at all too.
_GAP = r"(?:\s|\\+(?:[nrtvf]|x[0-9a-f]{2}|u[0-9a-f]{4}))*"
_BASE64 = "[A-Za-z0-9+/_-]"
_MARGIN = 2**16
"""Bytes before a tail that are read too, so that no secret is cut by its beginning."""


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with ``[NAME]`` for each value of an environment variable that holds a secret.

    Its name says so (`is_secret_name`), or its value begins as a private key does; of an address with a password, the
    password. A value has 8 characters at least, of three kinds, for others would be found everywhere; of names that may
    mean a column or a mark, such as PROMPT_KEY and EOS_TOKEN, words, paths and numbers are no secrets. It is found
    whatever white space joins its lines, line by line, as Python, JSON, HTML, a shell or an address writes it, in upper
    and lower case, and in base64. A record must not hold what was never meant to be written down, so this also holds
    for what a program of the user's, a library or a server said in an error. Redact before text is cut: a part of a
    secret is not found.

    >>> without_secrets("refused: 1234567890", {"JUDGE_API_KEY": "1234567890", "TOKENIZERS_PARALLELISM": "12345678"})
    'refused: [JUDGE_API_KEY]'
    """
    given = os.environ if environment is None else environment
    for sight in _sights(tuple(_secrets(given))):
        text = sight.taken_from(text)
    return text


def redacted(value: Any) -> Any:
    """Return a value of a record whose texts are `without_secrets`; field names, numbers and its form stay.

    So whatever the environment holds, what is then written as JSON has the keys and the numbers that it had.

    >>> redacted({"text": "a", "reward": 0.5})
    {'text': 'a', 'reward': 0.5}
    """
    # One search over all texts, since nearly no record holds a secret; the copy is made only where one does.
    said = "\n".join(_texts(value))
    return value if without_secrets(said) == said else _replaced(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str) and _is_address(key):
                yield key
            yield from _texts(inner)
    elif isinstance(value, list | tuple) and not set(map(type, value)) <= _PLAIN:
        for inner in value:
            yield from _texts(inner)


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {
            without_secrets(key) if isinstance(key, str) and _is_address(key) else key: inner
            if key in _OWN_WORDS
            else _replaced(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(inner) for inner in value]
    return value


def _is_address(key: str) -> bool:
    """Whether a key is no field's name but a model's or a file's."""
    return ":/" in key


def _secrets(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names and secret values."""
    for name, value in given.items():
        # Short values such as "1" or "aaaa" would be replaced all over a record.
        if len(value.strip()) < SHORTEST or len(set(value.strip())) < _FEW:
            continue
        if value.lstrip().startswith(_PRIVATE) or (is_secret_name(name) and not _is_ordinary(name, value)):
            yield name, value
        elif ":/" in value:
            # Of an address only the password is the secret; the host must stay readable in messages.
            yield from ((name, login[2]) for login in _ADDRESS.finditer(value) if len(login[2]) >= SHORTEST)


def _is_ordinary(name: str, value: str) -> bool:
    """Whether a value of an odd name is no secret: a column's name, a path, a count, a control token."""
    said = [w for word in re.split(r"[\W_]", name.upper()) if _WORD.fullmatch(w := word.rstrip("0123456789"))]
    is_odd = bool(said) and all(_ODD.fullmatch(word) for word in said) and not _STRONG.search(name.upper())
    return is_odd and not _SHAPES.search(value) and _ORDINARY.fullmatch(value.strip()) is not None


@dataclass(frozen=True)
class _Sight:
    """One way in which a secret can stand in a text.

    Attributes:
        pattern: The expression to look for, None where it is the needle and nothing else.
    """

    name: str
    needle: str
    pattern: str | None = None

    def taken_from(self, text: str) -> str:
        # A substring search is much faster than the expression, and nearly always finds nothing.
        if self.needle not in text:
            return text
        if self.pattern is None:
            return text.replace(self.needle, f"[{self.name}]")
        # Compiled where it is needed alone: that takes longer than to look for the needle.
        return re.sub(self.pattern, lambda _: f"[{self.name}]", text)


@lru_cache(maxsize=8)
def _sights(secrets: tuple[tuple[str, str], ...]) -> tuple[_Sight, ...]:
    """Return what to look for, the longest first: one secret may begin with another."""
    found: dict[str, tuple[int, _Sight]] = {}
    # The longest first, here and below: a shorter secret within a longer one would cut it, and leave its rest.
    for name, value in sorted(secrets, key=lambda secret: -len(secret[1])):
        for size, sight in (*_plainly(name, value), *_encoded(name, value)):
            found.setdefault(sight.pattern or sight.needle, (size, sight))
    return tuple(sight for _, sight in sorted(found.values(), key=lambda one: -one[0]))


def _plainly(name: str, value: str) -> Iterator[tuple[int, _Sight]]:
    """Yield a value, its lines, and both in upper and lower case, as each program writes them."""
    # Keys of several lines are often kept in one, with a backslash and an n between them.
    spread = value.replace("\\r", "").replace("\\n", "\n") if "-----" in value else value
    lines = [line.strip() for line in spread.splitlines()]
    alone = [line for line in lines if len(line) >= SHORTEST and not line.startswith("-----")] if len(lines) > 1 else []
    cases = (spread.upper(), spread.lower()) if len(value) >= 2 * SHORTEST else ()
    for said in dict.fromkeys((value, spread, *cases, *alone)):
        parts = said.split()
        once = _forms((tuple(parts if sum(map(len, parts)) >= SHORTEST else [said]),))
        # Twice: text that was quoted by one program is often quoted again by the next, as JSON within a log line.
        for written in _forms(once):
            pattern = _GAP.join(map(re.escape, written)) if len(written) > 1 else None
            yield sum(map(len, written)) + len(parts), _Sight(name, max(written, key=len), pattern)


def _forms(texts: Iterable[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    """Return each way to write each of the texts, once."""
    return dict.fromkeys(tuple(map(write, parts)) for parts in texts for write in _WRITTEN)


def _encoded(name: str, value: str) -> Iterator[tuple[int, _Sight]]:
    """Yield a value as it stands in an address, and in base64, of itself and within something longer."""
    content = value.strip().encode("utf-8", "surrogateescape")
    for percent in (quote(content, safe=""), quote(content), quote_plus(content)):
        for said in (percent, re.sub("%..", lambda code: code[0].lower(), percent)):
            yield len(said), _Sight(name, said)
    # Base64 encodes three bytes at a time, so a secret within a longer text has three alignments.
    for before in range(3):
        # The characters at both ends also depend on what stands before and after: those are taken along unseen.
        whole = base64.b64encode(b"\0" * before + content).decode().rstrip("=")
        is_even = (before + len(content)) % 3 == 0
        # Characters that depend on neighboring bytes are cut off: one or two at the beginning, one at the end.
        core = whole[before and before + 1 : len(whole) if is_even else -1]
        head, end = _BASE64 + "?" if before else "", "" if is_even else _BASE64 + "?"
        for said in (core, core.translate(str.maketrans("+/", "-_"))):
            yield len(said), _Sight(name, said, f"{head}{re.escape(said)}{end}={{0,2}}")


_WRITTEN: tuple[Callable[[str], str], ...] = (
    str,
    lambda value: repr(value)[1:-1],
    lambda value: ascii(value)[1:-1],
    lambda value: json.dumps(value)[1:-1],
    lambda value: json.dumps(value, ensure_ascii=False)[1:-1],
    lambda value: value.replace("'", "'\"'\"'"),
    html.escape,
    # As it stands in a text that holds both kinds of quotes.
    lambda value: repr(value + "'\"")[1:-4],
    lambda value: ascii(value + "'\"")[1:-4],
)


def for_people(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a message without secrets of an environment, without what looks like a provider's key, and `visible`.

    >>> for_people("cannot reach http://me:pass@host/v1")
    'cannot reach http://[secret]@host/v1'
    """
    return visible(_SHAPES.sub("[secret]", _ADDRESS.sub(r"\1[secret]", without_secrets(text, environment))))


def visible(text: str) -> str:
    r"""Return ``text`` with what a terminal would obey, or would not show, written out.

    Control characters but for the line feed and the tab, marks that change the direction of what follows, characters
    without a width, and halves of surrogate pairs: so no text moves the cursor, sets a title or hides a part of itself.

    >>> visible("a\x1b[2Jb\u202ec")
    'a\\x1b[2Jb\\u202ec'
    """
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, longest: int) -> str:
    """Return ``text``; where it is longer than ``longest`` its beginning, its end, and how much lies between them.

    Secrets are taken out before the cut, since a half of a secret would not be found.

    >>> shortened("abcdefghij", 4), shortened("abcd", 4)
    ('ab [... 6 characters ...] ij', 'abcd')
    """
    if len(text) <= longest:
        return text
    text = without_secrets(text)
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[len(text) - half :]}"


def tail(content: bytes, longest: int) -> str:
    """Return the end of what a program wrote, of at most ``longest`` characters, without secrets.

    >>> tail(b"first\\nlast\\n", 4)
    'last'
    """
    # Decoded with a margin in front, and cut after the secrets are out.
    said = without_secrets(content[-longest - _MARGIN :].decode(errors="replace")).strip()
    return said[-longest:] if longest else ""


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret; docs/security.md lists what says so.

    >>> is_secret_name("HF_TOKEN"), is_secret_name("PGPASSWORD"), is_secret_name("TOKENIZERS_PARALLELISM")
    (True, True, False)
    """
    upper = name.upper()
    if upper in _FOLDERS:
        return False
    return bool(_PHRASE.search(upper)) or any(
        _WORD.fullmatch(w.rstrip("0123456789")) for w in re.split(r"[\W_]", upper)
    )


def is_secret_setting(name: str) -> bool:
    """Whether a setting of this name in a file of settings can only be meant for a secret.

    >>> is_secret_setting("judge_api_key"), is_secret_setting("max_tokens"), is_secret_setting("key")
    (True, False, False)
    """
    return any(word in name.lower() for word in _SETTINGS)


def check_no_secret(settings: Mapping[str, Any], instead: str = "read it there") -> None:
    """Refuse a text among keyword arguments of the user's own code that can only be a secret.

    Args:
        instead: How the code gets it from an environment variable.

    Raises:
        ConfigError: The message names the setting, and not its value.
    """
    for name, value in settings.items():
        if isinstance(value, str) and is_secret_setting(name):
            raise ConfigError(
                f"settings.{name} would be written into the run's files for everybody to read; set an environment "
                f"variable, {instead}, and remove the setting"
            )
