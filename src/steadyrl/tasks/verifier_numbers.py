r"""Plain numbers as exact fractions: 033, 12.50, 3/4, \frac{3}{4}, 2\frac{1}{3}, 0.\overline{3}, 1.5 \times 10^3."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 4000

_SIGN = r"\s*(?P<sign>[+-]?)\s*"
_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
DECIMAL = re.compile(rf"{_SIGN}(?P<decimal>{_DECIMAL})")
SCIENTIFIC = re.compile(
    rf"{_SIGN}(?P<decimal>{_DECIMAL})(?:\s*(?:\\times|\\cdot|x)\s*10\s*\^\s*\{{?|[eE])\s*(?P<exponent>[+-]?[0-9]{{1,5}})\}}?"
)
REPEATING = re.compile(
    rf"{_SIGN}(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)\\(?:overline|bar|dot)\s*\{{?(?P<repeated>[0-9]+)\}}?"
)
FRACTION = re.compile(
    rf"{_SIGN}(?:(?P<mixed>[0-9]+)\s*)?\\frac\s*(?:\{{\s*(?P<top>-?\s*{_DECIMAL})\s*\}}|(?P<top1>[0-9]))"
    rf"\s*(?:\{{\s*(?P<bottom>-?\s*{_DECIMAL})\s*\}}|(?P<bottom1>[0-9]))"
)
SLASH = re.compile(rf"{_SIGN}(?:(?P<mixed>[0-9]+)\s+)?(?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})")


@dataclass(frozen=True)
class Number:
    """A number that is written out.

    `step` is one unit in its last place where it is written with a decimal point, else None;
    `digits` counts its significant digits.
    """

    value: Fraction
    step: Fraction | None
    digits: int

    def is_finite_decimal(self) -> bool:
        return has_finite_decimal(self.value)


def has_finite_decimal(value: Fraction) -> bool:
    """Whether a decimal can write the number exactly."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def read_number(text: str) -> Number | None:
    """The number that a text is, or None where it is something else."""
    if found := DECIMAL.fullmatch(text):
        return _decimal(found["sign"], found["decimal"], 0)
    if found := SCIENTIFIC.fullmatch(text):
        exponent = int(found["exponent"])
        return _decimal(found["sign"], found["decimal"], exponent) if abs(exponent) <= MAX_EXPONENT else None
    if found := REPEATING.fullmatch(text):
        return _exact(found["sign"], _repeating(found["whole"] or "0", found["fixed"], found["repeated"]))
    if found := FRACTION.fullmatch(text):
        return _fraction(
            found["sign"], found["mixed"], found["top"] or found["top1"], found["bottom"] or found["bottom1"]
        )
    if found := SLASH.fullmatch(text):
        return _fraction(found["sign"], found["mixed"], found["top"], found["bottom"])
    return None


def _decimal(sign: str, decimal: str, exponent: int) -> Number:
    whole, point, places = decimal.partition(".")
    scale = Fraction(10) ** exponent
    value = Fraction(int((whole or "0") + places), 10 ** len(places)) * scale
    digits = len((whole + places).lstrip("0"))
    return Number(-value if sign == "-" else value, scale / 10 ** len(places) if point and places else None, digits)


def _repeating(whole: str, fixed: str, repeated: str) -> Fraction:
    ones = 10 ** len(fixed)
    return Fraction(int(whole + fixed), ones) + Fraction(int(repeated), ones * (10 ** len(repeated) - 1))


def _fraction(sign: str, mixed: str | None, top: str, bottom: str) -> Number | None:
    numerator, denominator = Fraction(_plain(top)), Fraction(_plain(bottom))
    if denominator == 0 or (mixed and not numerator < denominator):
        return None
    return _exact(sign, int(mixed or 0) + numerator / denominator)


def _plain(decimal: str) -> str:
    text = decimal.replace(" ", "")
    return text[:-1] if text.endswith(".") else text


def _exact(sign: str, value: Fraction) -> Number:
    return Number(-value if sign == "-" else value, None, 0)
