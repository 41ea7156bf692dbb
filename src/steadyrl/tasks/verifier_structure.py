r"""The structure of an answer: numbers, lists, sets, tuples, intervals, equations, matrices, words.

The outer structure is read here, so that no library decides what a comma or a bracket means:
`(3, 1)` stays an ordered pair (an empty interval elsewhere), `1 234` a number (1 + 234 elsewhere).
What is left, single expressions, goes to math-verify's parser. Pure text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from steadyrl.tasks.answers import closing, strip_ends
from steadyrl.tasks.verifier_numbers import Number, read_number
from steadyrl.tasks.verifier_units import split_marks

MAX_DEPTH = 20

LIST_SIGN = re.compile(
    r"[,;]|\\text\s*\{\s*(?:or|and)\s*\}|(?<![A-Za-z\\{])(?:or|and)(?![A-Za-z])|\\(?:lor|vee)(?![a-zA-Z])"
)
RELATION_SIGN = re.compile(r":?=|<|>|\\(?:le|ge|ne|in|equiv)(?![a-zA-Z])")
SET_SIGN = re.compile(r"\\(?:cup|cap|setminus|backslash)(?![a-zA-Z])|(?<= )U(?= )")
APPROXIMATELY = re.compile(r"\\(?:approx|simeq|sim)(?![a-zA-Z])")
PLUS_MINUS, MINUS_PLUS = re.compile(r"\\pm(?![a-zA-Z])"), re.compile(r"\\mp(?![a-zA-Z])")
NAMED_SET = re.compile(r"\\mathbb\s*\{[A-Z]\}|\\R|\\emptyset")
RATIO_SIGN = re.compile(r":")
ROW_SIGN, CELL_SIGN = re.compile(r"\\\\"), re.compile("&")
MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9,/]| [0-9])")
WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*")
SHORT_WORDS = {
    "yes",
    "no",
    "one",
    "two",
    "six",
    "ten",
    "all",
    "odd",
    "red",
}  # and no products
OPENING, CLOSING = "([{", ")]}"


class Unparsable(Exception):
    """A text that is no answer in any notation read here; the message says why."""


@dataclass(frozen=True)
class Scalar:
    """One expression; `number` where it is a plain number."""

    text: str
    number: Number | None = None
    unit: str = ""
    percent: bool = False
    degrees: bool = False
    modulus: str = ""


@dataclass(frozen=True)
class Words:
    """Text that is compared as text."""

    text: str


@dataclass(frozen=True)
class Items:
    """Several values. `brackets`: "" a bare list, "&" one joined by "and", "{}" a set, "()" "[)" ... as written."""

    brackets: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Relation:
    """A chain of parts with the signs between them, as in 0 < x < 1."""

    parts: tuple[Value, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Combination:
    """Sets combined from left to right by union, intersection and difference."""

    parts: tuple[Value, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]


Value = Scalar | Words | Items | Relation | Combination | Matrix


def read_value(text: str, depth: int = 0) -> Value:
    """The structure of a cleaned answer.

    Raises:
        Unparsable: the text follows no notation.
    """
    text = strip_ends(text)
    if not text:
        raise Unparsable("it is empty")
    if depth > MAX_DEPTH:
        raise Unparsable("it is nested too deeply")
    if not is_balanced(text):
        raise Unparsable("its brackets do not match")
    matrix = MATRIX.fullmatch(text)
    if matrix:
        return _matrix(matrix.group(2), depth)
    text = _join_thousands(text)
    parts, signs = split_top(text, LIST_SIGN)
    if signs:
        joined = "&" if all("and" in sign for sign in signs) else ""
        return _spread(Items(joined, _values([part for part in parts if part.strip()], depth)))
    parts, signs = split_top(text, RELATION_SIGN)
    if signs:
        heads = tuple(_value_or_words(part, depth) for part in parts[:-1])
        return Relation((*heads, read_value(parts[-1], depth + 1)), tuple(sign.strip(" :") for sign in signs))
    parts, signs = split_top(text, SET_SIGN)
    if signs:
        return Combination(_values(parts, depth), tuple(signs))
    inside = _bracketed(text)
    if inside is not None:
        return _bracket_value(text, inside, depth)
    if PLUS_MINUS.search(text) or MINUS_PLUS.search(text):
        return Items("", _values(_both_signs(text), depth))
    parts, signs = split_top(text, RATIO_SIGN)
    if signs:
        return Items(":", _values(parts, depth))
    return _leaf(text)


def split_top(text: str, sign: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Cut a text at the signs that stand outside all brackets: the parts, and the signs between them."""
    depths = _depths(text)
    parts, signs, start = [], [], 0
    for found in sign.finditer(text):
        if depths[found.start()] == 0:
            parts.append(text[start : found.start()])
            signs.append(found.group())
            start = found.end()
    return [*parts, text[start:]], signs


def is_balanced(text: str) -> bool:
    """Whether every bracket is closed; ( and [ may close each other, as half-open intervals do."""
    opened = []
    for token in re.findall(r"\\.|[()\[\]{}]", text):
        if token in ("(", "[", "{", r"\{"):
            opened.append(token)
        elif token in (")", "]", "}", r"\}") and (
            not opened or (opened.pop() in "([") != (token in ")]")  # kinds: round or square, curly
        ):
            return False
    return not opened


def approximate_parts(text: str) -> list[str]:
    """What stands left and right of an approximately-equal sign; one part where there is none."""
    return [part.strip() for part in split_top(text, APPROXIMATELY)[0]]


def _depths(text: str) -> list[int]:
    r"""How many brackets are open before each character; the braces of \text{or} do not count."""
    depths, depth, i = [], 0, 0
    transparent = [(m.start(), m.end()) for m in LIST_SIGN.finditer(text) if m.group().startswith("\\text")]
    while i < len(text):
        width = 2 if text[i] == "\\" and i + 1 < len(text) else 1
        token = text[i : i + width]
        if token in ("\\{", *OPENING):
            depths += [depth] * width
            depth += 1
        elif token in ("\\}", *CLOSING):
            depth -= 1
            depths += [depth] * width
        else:
            depths += [depth] * width
        i += width
    for start, end in transparent:
        depths[start:end] = [depths[start]] * (end - start)
    return depths


def _values(parts: list[str], depth: int) -> tuple[Value, ...]:
    return tuple(read_value(part, depth + 1) for part in parts)


def _value_or_words(text: str, depth: int) -> Value:
    """The left side of an equation may be a name in any notation, such as an angle."""
    try:
        return read_value(text, depth + 1)
    except Unparsable:
        return Words(text.strip())


def _spread(items: Items) -> Items:
    """x = 1, 2 as x = 1, x = 2."""
    first, *others = items.values
    if not isinstance(first, Relation) or first.signs != ("=",) or any(isinstance(o, Relation) for o in others):
        return items
    name, value = first.parts
    return Items(items.brackets, tuple(Relation((name, one), ("=",)) for one in (value, *others)))


def _bracketed(text: str) -> str | None:
    """What a pair of brackets around the whole text holds."""
    if text.startswith("\\{"):
        return text[2:-2] if closing(text, 0) == len(text) - 2 else None
    if text[0] not in "([" or text[-1] not in ")]":
        return None
    return text[1:-1] if 0 not in _depths(text)[1:-1] else None


def _bracket_value(text: str, inside: str, depth: int) -> Value:
    is_set = text.startswith("\\{")
    parts, signs = split_top(inside, re.compile("[,;]"))
    if not signs and not is_set:
        return read_value(inside, depth + 1)
    return Items("{}" if is_set else text[0] + text[-1], _values(parts, depth))


def _both_signs(text: str) -> list[str]:
    signs = (("+", "-"), ("-", "+"))
    return [MINUS_PLUS.sub(opposite, PLUS_MINUS.sub(sign, text)) for sign, opposite in signs]


def _matrix(content: str, depth: int) -> Matrix:
    rows = [row for row in split_top(content, ROW_SIGN)[0] if row.strip()]
    return Matrix(tuple(_values(split_top(row, CELL_SIGN)[0], depth) for row in rows))


def _join_thousands(text: str) -> str:
    """1,234 and 1 234 as 1234, outside brackets: (100,200) is a pair."""
    depths = _depths(text)

    def joined(found: re.Match[str]) -> str:
        return found.group() if depths[found.start()] else re.sub("[, ]", "", found.group())

    return THOUSANDS.sub(joined, text)


def _leaf(text: str) -> Value:
    marks = split_marks(text)
    rest = strip_ends(marks.rest)
    if not rest:
        return Words(text)
    if NAMED_SET.fullmatch(rest) or (WORDS.fullmatch(rest) and _is_wording(rest)):
        return Words(text)
    if _bracketed(rest) is not None or rest != text.strip():
        inner = read_value(rest, MAX_DEPTH)
        if not isinstance(inner, Scalar):
            return inner
        rest = inner.text
    return Scalar(rest, read_number(rest), marks.unit, marks.percent, marks.degrees, marks.modulus)


def _is_wording(text: str) -> bool:
    """Whether letters are words and not a product of variables."""
    return " " in text or len(text) >= 4 or text.lower() in SHORT_WORDS
