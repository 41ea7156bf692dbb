"""Numbers and arithmetic against Python's own fractions."""

from __future__ import annotations

import operator
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.tasks.verifier_numbers import has_finite_decimal, read_number
from steadyrl.tasks.verifier_policy import Policy

judge = pytest.importorskip("steadyrl.tasks.verifier_equality", reason="needs the extra real").judge

FRACTIONS = st.fractions(min_value=-1000, max_value=1000, max_denominator=999)


def spellings(value: Fraction) -> list[str]:
    sign, size = "-" if value < 0 else "", abs(value)
    top, bottom = size.numerator, size.denominator
    whole, rest = divmod(top, bottom)
    found = [
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"\frac{{{sign}{top}}}{{{bottom}}}",
        rf"{sign}\dfrac{{{3 * top}}}{{{3 * bottom}}}",
        f"{sign}{top}/{bottom}",
        f"{sign}00{top} / {bottom}",
    ]
    if rest and whole:
        found += [rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}", f"{sign}{whole} {rest}/{bottom}"]
    if bottom == 1:
        found += [f"{sign}{top}", f"{sign}0{top}", f"{sign}{top:,}", f"{sign}{top}.", f"{sign}{top}.0"]
    return found


@given(FRACTIONS, FRACTIONS)
def test_every_spelling_of_a_number_equals_the_number_and_no_other(value, other):
    gold = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    for spelling in spellings(value):
        assert judge(gold, spelling, Policy())[0] == "right"
    for spelling in spellings(other):
        assert judge(gold, spelling, Policy())[0] == ("right" if value == other else "wrong")


@given(st.integers(-(10**9), 10**9), st.integers(0, 12))
def test_a_decimal_is_the_fraction_that_python_reads(number, places):
    text = f"{'-' if number < 0 else ''}{abs(number):0{places + 1}d}"
    text = text[: len(text) - places] + "." + text[len(text) - places :] if places else text
    found = read_number(text)
    assert found is not None
    assert found.value == Fraction(text) == Fraction(number, 10**places)
    assert found.step == (Fraction(1, 10**places) if places else None)


@given(FRACTIONS)
def test_a_finite_decimal_form_is_one_that_decimal_division_ends_at(value):
    rest, seen = value.numerator % value.denominator, set()
    while rest and rest not in seen:
        seen.add(rest)
        rest = rest * 10 % value.denominator
    assert has_finite_decimal(value) == (rest == 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"-1.2\overline{34}", -Fraction(611, 495)),
        ("1.5e3", Fraction(1500)),
        (r"1.5 \times 10^{-3}", Fraction(3, 2000)),
        (r"2 \cdot 10^4", Fraction(20000)),
        (".5", Fraction(1, 2)),
        (r"\frac12", Fraction(1, 2)),
    ],
)
def test_other_notations(text, value):
    found = read_number(text)
    assert found is not None
    assert found.value == value


@pytest.mark.parametrize(
    "text", ["", ".", "-", "1.2.3", "1e99999", "1/0", r"\frac{1}{0}", r"1\frac{3}{2}", "x", "2 3", "1,2"]
)
def test_what_is_no_number(text):
    assert read_number(text) is None


def arithmetic(draw: random.Random, depth: int) -> tuple[str, Fraction]:
    """A random expression in LaTeX, and its value."""
    if depth == 0:
        number = draw.randint(0, 12)
        return draw.choice([(str(number), Fraction(number)), (f"{number}.5", Fraction(2 * number + 1, 2))])
    kind = draw.choice(["add", "subtract", "dot", "side by side", "fraction", "power", "negative", "binomial"])
    left, a = arithmetic(draw, depth - 1)
    right, b = arithmetic(draw, depth - 1)
    if kind in ("add", "subtract"):
        sign, apply = ("+", operator.add) if kind == "add" else ("-", operator.sub)
        return rf"\left({left}\right) {sign} ({right})", apply(a, b)
    if kind == "dot":
        return rf"({left}) {draw.choice([chr(92) + 'cdot', chr(92) + 'times', '*'])} ({right})", a * b
    if kind == "side by side":
        factor = draw.randint(2, 9)
        return draw.choice([(f"({left})({right})", a * b), (f"{factor}({right})", factor * b)])
    if kind == "fraction" and b != 0:
        return draw.choice([rf"\frac{{{left}}}{{{right}}}", f"({left})/({right})"]), a / b
    if kind == "power":
        exponent = draw.choice([0, 2, 3]) if a == 0 else draw.choice([-2, 0, 2, 3])
        return f"({left})^{{{exponent}}}", a**exponent
    if kind == "binomial":
        return rf"{draw.randint(3, 3)}\binom{{6}}{{2}}", Fraction(45)
    return f"-({left})", -a


@pytest.mark.parametrize("seed", range(40))
def test_arithmetic_has_the_value_that_python_gives_it(seed):
    latex, value = arithmetic(random.Random(seed), 3)
    assert judge(str(value), latex, Policy())[0] == "right", latex
    assert judge(str(value + 1), latex, Policy())[0] == "wrong", latex
