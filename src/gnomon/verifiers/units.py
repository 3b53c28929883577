"""Units that stand beside a number, each under one name whatever its spelling."""

import re

_SPELLINGS = {
    "%": "percent percents percentage pct", "\u00b0": "degree degrees deg", "$": "dollar dollars usd",
    "\u20ac": "euro euros eur", "\u00a3": "gbp", "\u00a5": "yen jpy yuan cny rmb",
    "cent": "cents", "km": "kilometer kilometers kilometre kilometres", "m": "meter meters metre metres",
    "cm": "centimeter centimeters centimetre centimetres", "mm": "millimeter millimeters millimetre millimetres",
    "ft": "foot feet", "in": "inch inches", "mi": "mile miles", "yd": "yard yards",
    "kg": "kilogram kilograms", "g": "gram grams", "mg": "milligram milligrams", "lb": "lbs pound pounds",
    "oz": "ounce ounces", "ton": "tons tonne tonnes", "l": "liter liters litre litres",
    "ml": "milliliter milliliters millilitre millilitres", "gal": "gallon gallons", "s": "sec secs second seconds",
    "min": "mins minute minutes", "h": "hr hrs hour hours", "day": "days", "week": "weeks", "month": "months",
    "year": "years yr yrs", "mph": "", "kph": "", "rad": "radian radians", "unit": "units", "hz": "hertz",
    "n": "newton newtons", "j": "joule joules", "w": "watt watts", "v": "volt volts", "k": "kelvin",
}  # fmt: skip
CURRENCIES = "$\u20ac\u00a3\u00a5"
_NAMES = {spelling: name for name, others in _SPELLINGS.items() for spelling in (name, *others.split())}
_JOINING_WORDS = """
or and to mod over pi sqrt times plus minus thousand million billion trillion hundred dozen dozens
score half halves third thirds quarter quarters tenth tenths hundredth hundredths thousandth
thousandths if when for where with is are not than less more equals factorial cos sin tan log ln exp
undefined infinity base squared cubed out of remainder am pm bc ad
"""
_JOINING = frozenset(_JOINING_WORDS.split())
_UNIT = re.compile(r"(?:(?:square|cubic|sq|cu)\.? +)?([A-Za-z%\u00b0$\u20ac\u00a3\u00a5]+)")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]{2,}){0,3}")
_POWERS = {"squared": "2", "cubed": "3"}
_ATTACHED = re.compile(r"^\s*(?:\^\s*\{?\s*([23])\s*\}?|(squared|cubed))?$")
_RATE = re.compile(r"\s*(?:/|\bper\b)\s*")


def unit_of(rest: str, is_known: bool = False) -> str | None:
    """Return the one name of the unit that ``rest``, what stands behind a number, is; None when it is none.

    A word that the table does not know is a unit of its own (apples), unless ``is_known`` asks for those of the
    table; one that joins, multiplies or divides is none.

    >>> unit_of(" inches^2"), unit_of("square inches"), unit_of(" km/h"), unit_of(" apples"), unit_of(" or 7")
    ('in^2', 'in^2', 'km/h', 'apple', None)
    """
    if len(rest) > 60:
        return None
    names = [_single(part, is_glued=not rest[:1].isspace()) for part in _RATE.split(rest.strip().rstrip("."))]
    if is_known and not all(name and name.partition("^")[0] in _SPELLINGS for name in names):
        return None
    return None if None in names or len(names) > 2 else "/".join(filter(None, names))


def _single(text: str, is_glued: bool) -> str | None:
    found = _UNIT.match(text)
    if found is not None and (name := _NAMES.get(found[1].lower())) is not None:
        if is_glued and len(found[1]) == 1 and found[1].isalpha():
            return None  # 5m may be five times m
        attached = _ATTACHED.match(text[found.end() :])
        if attached is not None:
            prefix = text[:2].lower() if found.start(1) else ""
            power = attached[1] or _POWERS.get(attached[2] or "") or {"sq": "2", "cu": "3"}.get(prefix)
            return f"{name}^{power}" if power else name
    words = text.lower()
    if is_glued or not _WORDS.fullmatch(words) or _JOINING.intersection(re.split("[ -]", words)):
        return None
    return words.removesuffix("s")
