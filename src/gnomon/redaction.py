"""Secrets taken out of text before it is written or shown."""

import json
import os
import re
from collections.abc import Mapping

SHORTEST = 8
_WORDS = {
    "KEY", "KEYS", "APIKEY", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL",
    "CREDENTIALS", "PAT", "AUTH",
}  # fmt: skip
_SETTINGS = ("api_key", "apikey", "access_key", "access_token", "auth_token", "secret", "password", "passwd")
# A name and a password before a host; and the forms that providers give to their keys.
_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|AKIA[0-9A-Z]{16}|AIza[A-Za-z0-9_-]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})"
)
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with ``[NAME]`` for each value of an environment variable whose name says that it is a secret.

    Such a name has a word like KEY, TOKEN, SECRET or PASSWORD between underscores; a value has 8 characters at least,
    for a short one would be found everywhere. What nobody ever wrote down cannot be read from a record, so this also
    holds for what a program of the user's, a library or a server said in an error.

    >>> without_secrets("refused: 1234567890", {"JUDGE_API_KEY": "1234567890", "TOKENIZERS_PARALLELISM": "12345678"})
    'refused: [JUDGE_API_KEY]'
    """
    given = os.environ if environment is None else environment
    found = {value: name for name, value in given.items() if len(value) >= SHORTEST and is_secret_name(name)}
    # As it stands in what Python shows and in JSON too, where quotes and backslashes are written in another way.
    found |= {repr(value)[1:-1]: name for value, name in found.items()}
    found |= {json.dumps(value)[1:-1]: name for value, name in found.items()}
    # The longest first: one secret may begin with another.
    for value in sorted(found, key=len, reverse=True):
        if value in text:
            text = text.replace(value, f"[{found[value]}]")
    return text


def for_people(text: str) -> str:
    """Return a message without secrets of the environment, without what looks like a provider's key, and `visible`.

    >>> for_people("cannot reach http://me:pass@host/v1")
    'cannot reach http://[secret]@host/v1'
    """
    return visible(_SHAPES.sub("[secret]", _ADDRESS.sub("[secret]", without_secrets(text))))


def visible(text: str) -> str:
    r"""Return ``text`` with what a terminal would obey, or would not show, written out.

    Control characters but for the line feed and the tab, marks that change the direction of what follows, characters
    without a width, and halves of surrogate pairs: so no text moves the cursor, sets a title or hides a part of itself.

    >>> visible("a\x1b[2Jb\u202ec")
    'a\\x1b[2Jb\\u202ec'
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, longest: int) -> str:
    """Return ``text``; where it is longer than ``longest`` its beginning, its end, and how much lies between them.

    >>> shortened("abcdefghij", 4), shortened("abcd", 4)
    ('ab [... 6 characters ...] ij', 'abcd')
    """
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[len(text) - half :]}"


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret.

    >>> is_secret_name("HF_TOKEN"), is_secret_name("TOKENIZERS_PARALLELISM")
    (True, False)
    """
    return not _WORDS.isdisjoint(name.upper().split("_"))


def is_secret_setting(name: str) -> bool:
    """Whether a setting of this name in a file of settings can only be meant for a secret.

    >>> is_secret_setting("judge_api_key"), is_secret_setting("max_tokens"), is_secret_setting("key")
    (True, False, False)
    """
    return any(word in name.lower() for word in _SETTINGS)
