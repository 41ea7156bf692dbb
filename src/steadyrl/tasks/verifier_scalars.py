"""Whether two single values are the same under a policy: units, percent and degree signs, decimals. Needs sympy."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from sympy import Rational, pi

from steadyrl.tasks.verifier_expressions import constant, expression, is_constant, is_near, same_expression
from steadyrl.tasks.verifier_numbers import Number, has_finite_decimal
from steadyrl.tasks.verifier_policy import MarkReading, Policy
from steadyrl.tasks.verifier_structure import Scalar
from steadyrl.tasks.verifier_units import units_agree

Factors = tuple[Any, Any]  # sympy numbers for the gold answer and for the answer
ONE = Rational(1)


def same_scalar(gold: Scalar, answer: Scalar, policy: Policy) -> bool:
    if not units_agree(gold.unit, answer.unit):
        return False
    if gold.modulus and answer.modulus:
        return gold.modulus == answer.modulus and _same_residue(gold, answer)
    return any(_same_value(gold, g, answer, a, policy) for g, a in _mark_readings(gold, answer, policy))


def _same_residue(gold: Scalar, answer: Scalar) -> bool:
    modulus = expression(Scalar(gold.modulus))
    difference = expression(gold) - expression(answer)
    quotient = difference / modulus
    return bool(is_constant(quotient) and constant(quotient).is_integer)


def _mark_readings(gold: Scalar, answer: Scalar, policy: Policy) -> list[Factors]:
    """Factors for the two values: a percent or degree sign that only one of them has is dropped or converted."""
    if gold.percent != answer.percent:
        return _choose(policy.percent, Rational(1, 100), gold.percent)
    if gold.degrees != answer.degrees:
        return _choose(policy.degrees, pi / 180, gold.degrees)
    return [(ONE, ONE)]


def _choose(reading: MarkReading, factor: Any, is_gold: bool) -> list[Factors]:
    plain = (ONE, ONE)
    converted = (factor, ONE) if is_gold else (ONE, factor)
    return {"number": [plain], "converted": [converted], "either": [plain, converted]}[reading]


def _same_value(gold: Scalar, g: Any, answer: Scalar, a: Any, policy: Policy) -> bool:
    one, other = expression(gold) * g, expression(answer) * a
    if same_expression(one, other):
        return True
    if not (is_constant(one) and is_constant(other)):
        return False
    decimals = [
        (value.number, factor, another)
        for value, factor, another in ((gold, g, other), (answer, a, one))
        if value.number is not None and value.number.step is not None and factor.is_Rational
    ]
    return any(_stands_for(number, factor, constant(another), policy) for number, factor, another in decimals) or (
        bool(decimals) and policy.tolerance > 0 and _within_tolerance(constant(one), constant(other), policy.tolerance)
    )


def _stands_for(number: Number, factor: Any, exact: Any, policy: Policy) -> bool:
    """Whether a decimal is a number without a finite decimal form, rounded or cut off at the decimal's last place."""
    if number.digits < policy.digits or number.step is None:
        return False
    if exact.is_Rational and has_finite_decimal(Fraction(int(exact.p), int(exact.q))):
        return False
    scale = Fraction(int(factor.p), int(factor.q))
    value = number.value * scale
    return is_near(exact, value, max(number.step * scale, abs(value) / 10**12))


def _within_tolerance(gold: Any, answer: Any, tolerance: float) -> bool:
    difference = abs((gold - answer).evalf(30))
    return bool(difference.is_real and difference <= tolerance * abs(gold.evalf(30)))
