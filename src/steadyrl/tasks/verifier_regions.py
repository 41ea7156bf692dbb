r"""Sets of real numbers: intervals, inequalities in one variable, unions of them. Needs sympy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from sympy import (
    And,
    Complement,
    EmptySet,
    FiniteSet,
    Integers,
    Intersection,
    Interval,
    Naturals,
    Rationals,
    Reals,
    Union,
)
from sympy.core.relational import Ge, Gt, Le, Lt, Ne, Relational

from steadyrl.tasks.verifier_expressions import constant, expression, is_constant, same_number
from steadyrl.tasks.verifier_structure import Combination, Items, Relation, Scalar, Value, Words

INTERVAL_BRACKETS = ("()", "(]", "[)", "[]")
SIGNS: dict[str, Any] = {"<": Lt, ">": Gt, r"\le": Le, r"\ge": Ge, r"\ne": Ne}
# the sign that says the same with its sides exchanged
MIRRORED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
OPERATIONS = {r"\cup": Union, "U": Union, r"\cap": Intersection, r"\setminus": Complement, r"\backslash": Complement}
NAMED = {
    r"\mathbb{R}": Reals, r"\R": Reals, "all real numbers": Reals, "all reals": Reals, r"\emptyset": EmptySet,
    r"\mathbb{Z}": Integers, r"\mathbb{N}": Naturals, r"\mathbb{Q}": Rationals,
}  # fmt: skip


@dataclass(frozen=True)
class Region:
    """A set of numbers, and the variable that lies in it where one is named."""

    name: str | None
    numbers: Any  # sympy's Set


def region_of(value: Value) -> Region | None:
    """The set of real numbers that a value describes, or None where it describes something else.

    Raises:
        Unparsable: an end point cannot be read.
    """
    if isinstance(value, (Words, Scalar)):
        numbers = NAMED.get(value.text.strip()) or NAMED.get(value.text.strip().lower())
        return Region(None, numbers) if numbers is not None else None
    if isinstance(value, Items):
        return _of_items(value)
    if isinstance(value, Relation):
        return _of_relation(value)
    if isinstance(value, Combination):
        regions = [region_of(part) for part in value.parts]
        found = [region.numbers for region in regions if region is not None]
        if len(found) < len(regions):
            return None
        numbers = found[0]
        for sign, part in zip(value.signs, found[1:], strict=True):
            numbers = OPERATIONS[sign](numbers, part)
        return Region(None, numbers)
    return None


def same_region(one: Region, other: Region) -> bool:
    if one.name is not None and other.name is not None and one.name != other.name:
        return False
    if one.numbers == other.numbers:
        return True
    pieces, others = _pieces(one.numbers), _pieces(other.numbers)
    return (
        pieces is not None
        and others is not None
        and len(pieces) == len(others)
        and all(map(_same_piece, pieces, others))
    )


def _of_items(items: Items) -> Region | None:
    values = items.values
    if items.brackets in INTERVAL_BRACKETS and len(values) == 2:
        ends = [_number(value) for value in values]
        if ends[0] is None or ends[1] is None or not bool(ends[0] < ends[1]):
            return None
        return Region(None, Interval(ends[0], ends[1], items.brackets[0] == "(", items.brackets[1] == ")"))
    if items.brackets == "{}":
        numbers = [_number(value) for value in values]
        return None if None in numbers else Region(None, FiniteSet(*numbers))
    if items.brackets in ("", "&") and all(isinstance(value, Relation) for value in values):
        regions = [region_of(value) for value in values]
        found = [region for region in regions if region is not None]
        if len(found) < len(regions) or len({region.name for region in found}) > 1:
            return None
        combine = Intersection if items.brackets == "&" else Union
        return Region(found[0].name, reduce(combine, (region.numbers for region in found)))
    return None


def _of_relation(relation: Relation) -> Region | None:
    first, last = relation.parts[0], relation.parts[-1]
    if relation.signs == (r"\in",) and isinstance(first, Scalar):
        inner = region_of(last)
        return Region(first.text, inner.numbers) if inner is not None else None
    if not set(relation.signs) <= set(SIGNS) or not all(isinstance(part, Scalar) for part in relation.parts):
        return None
    sides = [expression(part) for part in relation.parts if isinstance(part, Scalar)]
    symbols = set().union(*(side.free_symbols for side in sides))
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    steps: list[Any] = [SIGNS[sign](sides[i], sides[i + 1]) for i, sign in enumerate(relation.signs)]
    if not all(isinstance(step, Relational) for step in steps):
        return None
    try:
        return Region(str(symbol), And(*steps).as_set())
    except NotImplementedError:
        return None


def _number(value: Value) -> Any:
    if not isinstance(value, Scalar):
        return None
    found = expression(value)
    if not is_constant(found):
        return None
    number = constant(found)
    return number if number.is_extended_real else None


def _pieces(numbers: Any) -> list[tuple[Any, ...]] | None:
    """Intervals in order, a single number as an interval that holds only it."""
    parts = numbers.args if isinstance(numbers, Union) else (numbers,)
    pieces: list[tuple[Any, ...]] = []
    for part in parts:
        if isinstance(part, Interval):
            pieces.append((part.start, part.end, part.left_open, part.right_open))
        elif isinstance(part, FiniteSet):
            pieces += [(point, point, False, False) for point in part.args]
        else:
            return None
    return sorted(pieces, key=lambda piece: float(piece[0]))


def _same_piece(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[2:] == other[2:] and same_number(one[0], other[0]) and same_number(one[1], other[1])
