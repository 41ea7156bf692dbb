"""Equality of single expressions, decided on exact numbers. Runs in the verifier's workers; needs sympy.

In annotations Any is a sympy expression: its own are too loose to be checked against.

Numbers: rationals exactly, others to 100 digits relative to their size. Expressions with variables: at
points where the gold answer is real. Nothing is evaluated whose result would be longer than MAX_BITS.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy import (
    Add,
    Expr,
    I,
    Integer,
    Mul,
    Pow,
    Rational,
    Symbol,
    binomial,
    exp,
    factorial,
    nan,
    oo,
    simplify,
    zoo,
)
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef, Function

from steadyrl.tasks.verifier_latex import to_latex
from steadyrl.tasks.verifier_structure import Scalar, Unparsable

MAX_BITS = 1 << 18  # of a number that is worked out: 79,000 digits
POINT_SEED = 20_260_722
NUM_POINTS = 12
ENOUGH_POINTS = 3
READER = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
UNDEFINED_HERE = (ValueError, TypeError, ZeroDivisionError, NotImplementedError, AttributeError)


@lru_cache(maxsize=256)
def expression(scalar: Scalar) -> Any:
    """The sympy expression of a scalar, not evaluated.

    Raises:
        Unparsable: it is no expression.
    """
    if scalar.number is not None:
        return _rational(scalar.number.value)
    latex = to_latex(scalar.text)
    try:
        found = latex2sympy(
            latex, is_real=True, convert_degrees=False, normalization_config=None, conversion_config=READER
        )
    except MemoryError:
        raise
    except Exception as error:  # the parser raises plain Exception for what it cannot read
        raise Unparsable(f"math-verify cannot read it: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(found, Expr):
        raise Unparsable("it is no single expression")
    return _with_imaginary_unit(_without_calls(found))


def is_constant(value: Any) -> bool:
    return not value.free_symbols


def constant(value: Any) -> Any:
    """A number worked out.

    Raises:
        Unparsable: it is too large, or not defined.
    """
    _check_size(value)
    done = value.doit()
    if done.has(nan, zoo):
        raise Unparsable("it is not defined")
    return done


def same_expression(gold: Any, answer: Any) -> bool:
    """Whether two expressions are equal, at every point where the gold answer is real.

    Raises:
        Unparsable: a number that is too large, or not defined.
    """
    if gold == answer:
        return True
    if is_constant(gold) and is_constant(answer):
        return same_number(constant(gold), constant(answer))
    pairs = list(_values([gold, answer]))
    if len(pairs) >= ENOUGH_POINTS:
        return all(_same_at_point(*pair) for pair in pairs)
    return simplify(gold - answer) == 0


def same_number(one: Any, other: Any, digits: int = 100) -> bool:
    if one == other:
        return True
    if (one.is_Rational and other.is_Rational) or one.has(oo, -oo) or other.has(oo, -oo):
        return False
    difference = (one - other).evalf(15, maxn=3 * digits)
    sizes = [abs(value.evalf(15)) for value in (one, other)]
    if not all(_is_worked_out(value) for value in (difference, *sizes)):
        raise Unparsable("it cannot be worked out")
    return bool(abs(difference) <= max(sizes) * Rational(1, 10**digits))


def is_near(value: Any, target: Fraction, distance: Fraction) -> bool:
    """Whether a real number lies within a distance of a fraction."""
    difference = (value - _rational(target)).evalf(30)
    return bool(difference.is_real and abs(difference) < _rational(distance))


def proportional(one: Any, other: Any) -> Any:
    """The constant c other than 0 with one = c * other everywhere, or None."""
    if one.free_symbols != other.free_symbols:
        return None
    pairs = [pair for pair in _values([one, other]) if None not in pair]
    factors = [a / b for a, b in pairs if a is not None and b is not None and not _is_zero(b)]
    if len(factors) < ENOUGH_POINTS or _is_zero(factors[0]):
        return None
    return factors[0] if all(same_number(factors[0], factor, 30) for factor in factors) else None


def _same_at_point(gold: Any, answer: Any) -> bool:
    return gold is not None and answer is not None and same_number(gold, answer, 30)


def _is_zero(value: Any) -> bool:
    return same_number(value, Integer(0), 30) or bool(abs(value.evalf(15, maxn=90)) < Rational(1, 10**30))


def _values(expressions: list[Any]) -> Iterator[list[Any]]:
    """The expressions' values at points where the first one is defined and real; None where another is not."""
    symbols = sorted(set().union(*(e.free_symbols for e in expressions)), key=str)
    is_complex = any(e.has(I) for e in expressions)
    whole = any(e.has(ExprWithLimits) for e in expressions)  # such as a sum up to n
    for point in _points(len(symbols), whole):
        at = dict(zip(symbols, point, strict=True))
        values = [_value_at(e, at, is_complex) for e in expressions]
        if values[0] is not None:
            yield values


def _points(dimension: int, whole: bool) -> Iterator[list[Any]]:
    """Whole and broken, positive and negative, small and large numbers; always the same."""
    draw = random.Random(POINT_SEED)
    for kind in range(NUM_POINTS):
        signs = [1 if kind < NUM_POINTS // 2 else draw.choice((1, -1)) for _ in range(dimension)]
        if whole or kind % 2 == 0:
            numbers = draw.sample(range(2, 19), dimension)
            yield [Integer(sign * number) for sign, number in zip(signs, numbers, strict=True)]
        else:
            size = draw.choice((10, 1000))
            yield [Rational(sign * draw.randint(1, size), draw.choice((7, 11, 13))) for sign in signs]


def _value_at(value: Any, at: dict[Any, Any], is_complex: bool) -> Any:
    try:
        number = value.xreplace(at)
        _check_size(number)
        number = number.doit()
        if number.has(nan, zoo, oo, -oo):
            return None
        if not is_complex and not number.is_Rational:
            numeric = number.evalf(30)
            if not _is_worked_out(numeric) or not numeric.is_real:
                return None
        return number
    except (*UNDEFINED_HERE, Unparsable):
        return None


def _is_worked_out(value: Any) -> bool:
    """Whether nothing but digits and the imaginary unit is left."""
    return all(atom.is_Number or atom is I for atom in value.atoms()) and not value.atoms(Function, ExprWithLimits)


def _check_size(value: Any) -> None:
    if _bits(value) > MAX_BITS:
        raise Unparsable("it is too large to be worked out")


def _bits(value: Any) -> float:
    """An upper bound of the binary digits that working a number out takes; symbols count as small numbers."""
    if value.is_Rational:
        return max(abs(value.p).bit_length(), value.q.bit_length())
    inner = [_bits(argument) for argument in value.args if isinstance(argument, Expr)]
    largest = max(inner, default=4.0)
    if isinstance(value, Add):
        return largest + math.log2(len(inner))
    if isinstance(value, Mul):
        return sum(inner)
    if isinstance(value, (Pow, exp)):
        base, exponent = value.as_base_exp()
        power = abs(float(exponent)) if exponent.is_Rational and _bits(exponent) < 900 else _power(_bits(exponent))
        return _bits(base) * power
    if isinstance(value, factorial):
        return largest * _power(largest)
    if isinstance(value, binomial):
        return _power(largest)
    return largest


def _power(bits: float) -> float:
    return 2.0 ** min(bits, 900.0)


def _without_calls(value: Any) -> Any:
    """f(x) as one symbol: nothing is known about it."""
    return value.xreplace({call: Symbol(str(call), real=True) for call in value.atoms(AppliedUndef)})


def _with_imaginary_unit(value: Any) -> Any:
    bound = {symbol for part in value.atoms(ExprWithLimits) for symbol in part.variables}
    return value.xreplace({s: I for s in value.free_symbols - bound if s.name == "i"})


def _rational(value: Fraction) -> Any:
    return Rational(value.numerator, value.denominator)
