"""The formula of any composition, in LaTeX and in plain text."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from gnomon.algorithms.composition import Composition
from gnomon.core.tables import packaged_toml

_TEMPLATES: Mapping[str, Any] = packaged_toml("gnomon.algorithms", "formulas.toml")
_LEVELS: Mapping[str, str] = {
    "token": r"r_t = \frac{\pi_t}{\pi^{<anchor>}_t}",
    "sequence": r"r_t = \exp(\frac{1}{|o|} \sum_s \log \frac{\pi_s}{\pi^{<anchor>}_s})",
    "sequence_token": r"r_t = \mathrm{sg}[\exp(\frac{1}{|o|} \sum_s \log \frac{\pi_s}{\pi^{<anchor>}_s})] "
    r"\frac{\pi_t}{\mathrm{sg}[\pi_t]}",
    "sequence_product": r"r_t = \prod_s \frac{\pi_s}{\pi^{<anchor>}_s}",
}
_PLAIN: tuple[tuple[str, str], ...] = (
    (r"\\begin\{cases\}", "{"), (r"\\end\{cases\}", "}"), (r" & \\text\{else\}", " otherwise"), (r" & ", " if "),
    (r" \\\\ ", "; "), (r"\\(left|right)", ""),
    (r"\\bar\{([^{}]*)\}", r"mean \1"), (r"\\hat\{([^{}]*)\}", r"target \1"),
    (r"\\(mathrm|text)\{([^{}]*)\}", r"\2"), (r"\\,|\\ ", " "),
    (r"\\le\b", "<="), (r"\\ge\b", ">="), (r"\\ne\b", "!="), (r"\\pm\b", "+-"),
    (r"\\ell(?![a-z])", "l"), (r"\\cdot\b", "*"), (r"\\([_$%&#])", r"\1"), (r"\\([a-z]+)", r"\1"),
    (r"([_^])\{([^{}]{1,2})\}", r"\1\2"), (r"([_^])\{([^{}]*)\}", r"\1(\2)"), (r" {2,}", " "),
)  # fmt: skip


def formula(algorithm: Composition) -> dict[str, str]:
    """Return the formulas of an algorithm's parts in LaTeX, by what each is.

    A piece of a user's own has its name and its settings.

    >>> from gnomon.algorithms import GRPO
    >>> formula(GRPO)["advantage"]
    'A_t = \\\\frac{R - \\\\bar{R}_G}{s_G + 10^{-6}}'
    >>> plain(formula(GRPO)["loss"])
    'L = sum_(i, t) w_t l_t'
    """
    policy = r"w_t \ell_t" if algorithm.correction is None else r"w_t c_t \ell_t"
    terms = [f"w^{number}_t q^{number}_t" for number in range(1, 1 + len(algorithm.regularizers))]
    found = {
        "loss": r"L = \sum_{i, t} " + (f"({' + '.join([policy, *terms])})" if terms else policy),
        "ratio": _LEVELS[algorithm.ratio.level].replace("<anchor>", algorithm.ratio.anchor),
        "advantage": f"A_t = {latex(algorithm.advantage)}",
        "surrogate": rf"\ell_t = {latex(algorithm.surrogate)}",
        "weight": f"w_t = {latex(algorithm.aggregate)}",
    }
    if algorithm.correction is not None:
        found["correction"] = f"c_t = {latex(algorithm.correction)}"
    if algorithm.critic is not None:
        found["critic"] = rf"\ell^V = {latex(algorithm.critic)}"
    for number, regularizer in enumerate(algorithm.regularizers, start=1):
        found[regularizer.name] = f"q^{number}_t = {latex(regularizer)}"
    return found


def latex(piece: Any) -> str:
    """Return the formula of a piece, with its parts and numbers in place."""
    if isinstance(piece, tuple):
        terms = [latex(each) for each in piece]
        if terms and terms[0].startswith(","):  # conditions, each of which follows a formula
            return "".join(terms)
        # What a formula says after a comma belongs to its own term.
        return " + ".join(rf"\left[ {t} \right]" if r",\ " in t and len(terms) > 1 else t for t in terms)
    if piece is None:
        return r"\text{all}"
    if not is_dataclass(piece):
        text = f"{piece:g}" if isinstance(piece, float) else re.sub(r"([_$%&#])", r"\\\1", str(piece))
        return re.sub(r"^(.*)e-0?(\d+)$", _power, text) if isinstance(piece, float) else text
    parts = {f.name: latex(getattr(piece, f.name)) for f in fields(piece)}
    template = _TEMPLATES.get(type(piece).__name__)
    if isinstance(template, Mapping):
        template = template[str(getattr(piece, template["by"]))]
    if template is None or not type(piece).__module__.startswith("gnomon."):
        said = ", ".join(f"{name} = {value}" for name, value in parts.items())
        return rf"\mathrm{{{type(piece).__name__}}}({said})"
    return re.sub(r"<(\w+)>", lambda found: parts[found[1]], str(template)).replace(r"_{\mathrm{}}", "")


def _power(number: re.Match[str]) -> str:
    return ("" if number[1] == "1" else rf"{number[1]} \cdot ") + f"10^{{-{number[2]}}}"


def plain(text: str) -> str:
    """Return a formula as it is read in a terminal.

    >>> plain(r"\\frac{R - \\bar{R}_G}{s_G + 1}")
    '(R - mean R_G) / (s_G + 1)'
    """
    # Cases, bars and hats first: their braces would hide those of a fraction around them.
    for pattern, replacement in _PLAIN[:8]:
        text = re.sub(pattern, replacement, text)
    inner = r"((?:[^{}]|\{[^{}]*\})*)"
    # A fraction with fractions inside matches once these are replaced; one that never matches ends the loop.
    while r"\frac" in text:
        made = re.sub(rf"\\frac\{{{inner}\}}\{{{inner}\}}", lambda found: _over(found[1], found[2]), text, count=1)
        if made == text:
            break
        text = made
    for pattern, replacement in _PLAIN[8:]:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def _over(above: str, below: str) -> str:
    above, below = (p if re.fullmatch(r"\\?[\w.]+|\|o\||\\pi\^\{\w+\}_\w", p) else f"({p})" for p in (above, below))
    return f"{above} / {below}"
