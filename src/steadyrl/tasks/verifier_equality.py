"""The verdict on one answer: whether it says the same as the gold answer, under a policy.

Runs in the verifier's workers; needs sympy and math-verify's parser. The comparison is not symmetric: it
is the gold answer that says where an expression is defined and whether an equation was asked for.
"""

from __future__ import annotations

import re
from typing import Literal

from steadyrl.tasks.answers import clean
from steadyrl.tasks.verifier_expressions import constant, expression, is_constant, proportional, same_expression
from steadyrl.tasks.verifier_policy import Policy
from steadyrl.tasks.verifier_regions import MIRRORED, region_of, same_region
from steadyrl.tasks.verifier_scalars import same_scalar
from steadyrl.tasks.verifier_structure import (
    Combination,
    Items,
    Matrix,
    Relation,
    Scalar,
    Unparsable,
    Value,
    Words,
    approximate_parts,
    read_value,
)

Judgement = Literal["right", "wrong", "unparsable", "error"]

# a name on the left of an equation: x, x_1, f(x), AB, |S|, \angle ABC
NAME = re.compile(r"[A-Za-z\\|][A-Za-z0-9\\_{}()|,' ]*")
CHOICE = re.compile(r"(?:\\text\s*\{)?\s*\(?([A-J])\s*\)\s*\}?[\s.:]*(?P<value>.*)", re.DOTALL)
CONSTANTS = (r"\pi", "e")
EQUALS = ("=", r"\equiv", r"\in")


def judge(gold: str, answer: str, policy: Policy) -> tuple[Judgement, str]:
    """Compare the text of an answer with the gold answer; the second item says why where it is not plain.

    "error" means that the gold answer itself cannot be read, so that nothing can be said.
    """
    gold_text, answer_text = clean(gold), clean(answer)
    if not answer_text:
        return "unparsable", "it is empty"
    if _squeeze(gold_text) == _squeeze(answer_text):
        return "right", ""
    choice = CHOICE.fullmatch(answer_text)
    if choice and choice["value"].strip():
        if re.fullmatch("[A-J]", gold_text):
            return ("right" if gold_text == choice[1] else "wrong"), ""
        answer_text = choice["value"]
    try:
        gold_values = _readings(gold_text, policy, refuse=False)
        for value in gold_values:
            _check(value)
    except Unparsable as error:
        return "error", f"the gold answer {gold!r} cannot be read: {error}"
    try:
        answers = _readings(answer_text, policy, refuse=policy.approximation == "refuse")
        is_right = any(same(g, a, policy) for g in gold_values for a in answers)
    except Unparsable as error:
        return "unparsable", str(error)
    return ("right" if is_right else "wrong"), ""


def same(gold: Value, answer: Value, policy: Policy) -> bool:
    """Whether two values say the same.

    Raises:
        Unparsable: a part of one of them cannot be read.
    """
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _same_words(gold, answer) or _same_region(gold, answer, policy)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relation(gold, answer, policy) or _same_region(gold, answer, policy)
    if isinstance(gold, Items) or isinstance(answer, Items):
        return _same_items(gold, answer, policy) or _same_region(gold, answer, policy)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return len(gold.rows) == len(answer.rows) and all(
            map(lambda g, a: _same_each(g, a, policy), gold.rows, answer.rows)
        )
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return same_scalar(gold, answer, policy)
    return _same_region(gold, answer, policy)


def _readings(text: str, policy: Policy, refuse: bool) -> list[Value]:
    """The values that a text with an approximately-equal sign may stand for."""
    parts = [part for part in approximate_parts(text) if part]
    if len(parts) < 2:
        return [read_value("".join(parts))]
    if refuse:
        raise Unparsable("it gives an approximation")
    if NAME.fullmatch(parts[0]) and parts[0] not in CONSTANTS and policy.approximation != "either":
        parts = parts[1:]  # x is about 3.14: the name is no value
    return [read_value(part) for part in (parts if policy.approximation == "either" else parts[:1])]


def _check(value: Value) -> None:
    """Read every expression of a gold answer once.

    Raises:
        Unparsable: one of them cannot be read.
    """
    if isinstance(value, Scalar):
        found = expression(value)
        if is_constant(found):
            constant(found)
    elif isinstance(value, Items):
        for one in value.values:
            _check(one)
    elif isinstance(value, Matrix):
        for row in value.rows:
            for one in row:
                _check(one)
    elif isinstance(value, Relation):
        _check(value.parts[-1])


def _same_words(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Words) and isinstance(answer, Words):
        return _squeeze(gold.text) == _squeeze(answer.text)
    return False


def _same_relation(gold: Value, answer: Value, policy: Policy) -> bool:
    gold_list, answer_list = _listed(gold), _listed(answer)
    if gold_list is not None and answer_list is not None and _same_items(gold_list, answer_list, policy):
        return True
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_equation(gold, answer, policy)
    if isinstance(gold, Relation):
        return _is_definition(gold) and same(gold.parts[-1], answer, policy)
    assert isinstance(answer, Relation)
    if not set(answer.signs) <= set(EQUALS) or not (_is_definition(answer) or _has_free_left_side(answer)):
        return False
    numbers = [p for p in answer.parts[:-1] if isinstance(p, Scalar) and not re.search("[A-Za-z]", p.text)]
    return same(gold, answer.parts[-1], policy) and all(same(gold, number, policy) for number in numbers)


def _same_equation(gold: Relation, answer: Relation, policy: Policy) -> bool:
    if _is_definition(gold) and _is_definition(answer) and _name(gold) == _name(answer):
        if same(gold.parts[-1], answer.parts[-1], policy):
            return True
        if not all(isinstance(p, Scalar) for p in (*gold.parts, *answer.parts)):
            return False
    if len(gold.signs) != 1 or len(answer.signs) != 1:
        return False
    sides = [side for relation in (gold, answer) for side in relation.parts]
    if not all(isinstance(side, Scalar) for side in sides):
        return False
    a, b, c, d = (expression(side) for side in sides if isinstance(side, Scalar))
    one, other = a - b, c - d
    if gold.signs == answer.signs == ("=",):
        one, other = (value.together().as_numer_denom()[0] for value in (one, other))
        return proportional(one, other) is not None
    factor = proportional(one, other)
    if factor is None or gold.signs[0] not in MIRRORED or not factor.is_real:
        return False
    return answer.signs[0] == (gold.signs[0] if factor > 0 else MIRRORED[gold.signs[0]]) or (
        gold.signs[0] == answer.signs[0] == r"\ne"
    )


def _same_items(gold: Value, answer: Value, policy: Policy) -> bool:
    if isinstance(gold, Items) and isinstance(answer, Items):
        if _brackets(gold, policy) != _brackets(answer, policy):
            return False
        if _brackets(gold, policy) in ("", "{}"):
            return _same_unordered(gold, answer, policy)
        return _same_each(gold.values, answer.values, policy)
    if isinstance(gold, Items) and isinstance(answer, Scalar):
        return _same_single(gold, answer, policy) or _same_ratio(gold, answer, policy)
    if isinstance(gold, Scalar) and isinstance(answer, Items):
        return _same_single(answer, gold, policy, swapped=True) or _same_ratio(answer, gold, policy)
    return False


def _same_single(items: Items, scalar: Scalar, policy: Policy, swapped: bool = False) -> bool:
    """{1} and 1."""
    if len(items.values) != 1 or policy.sets != "list":
        return False
    pair = (scalar, items.values[0]) if swapped else (items.values[0], scalar)
    return same(*pair, policy)


def _same_ratio(items: Items, scalar: Scalar, policy: Policy) -> bool:
    """3:4 and 3/4."""
    if items.brackets != ":" or len(items.values) != 2:
        return False
    first, second = items.values
    if not isinstance(first, Scalar) or not isinstance(second, Scalar):
        return False
    bottom = expression(second)
    if bottom == 0:
        return False
    return same_expression(expression(first) / bottom, expression(scalar))


def _same_unordered(gold: Items, answer: Items, policy: Policy) -> bool:
    """The same values in any order, a repeated one counted once."""
    golds = _distinct(gold.values, policy)
    answers = _distinct(answer.values, policy)
    return len(golds) == len(answers) and all(any(same(g, a, policy) for a in answers) for g in golds)


def _distinct(values: tuple[Value, ...], policy: Policy) -> list[Value]:
    kept: list[Value] = []
    for value in values:
        if not any(same(other, value, policy) for other in kept):
            kept.append(value)
    return kept


def _same_each(gold: tuple[Value, ...], answer: tuple[Value, ...], policy: Policy) -> bool:
    return len(gold) == len(answer) and all(same(g, a, policy) for g, a in zip(gold, answer, strict=True))


def _same_region(gold: Value, answer: Value, policy: Policy) -> bool:
    kinds = (Relation, Combination, Items, Words, Scalar)
    if not isinstance(gold, kinds) or not isinstance(answer, kinds):
        return False
    if policy.intervals == "strict" and _has_inequality(gold) != _has_inequality(answer):
        return False
    one = region_of(gold)
    other = region_of(answer) if one is not None else None
    return one is not None and other is not None and same_region(one, other)


def _listed(value: Value) -> Items | None:
    """Several equations or values as a bare list: x = y = 0, x in {1, 2}, (x, y) = (1, 2), "1, 2"."""
    if isinstance(value, Items):
        return value
    if not isinstance(value, Relation) or not set(value.signs) <= set(EQUALS):
        return None
    *names, last = value.parts
    if len(names) > 1 and all(_is_name(name) for name in names):
        return Items("", tuple(Relation((name, last), ("=",)) for name in names))
    if len(names) == 1 and isinstance(last, Items):
        if _is_name(names[0]) and last.brackets in ("", "{}"):
            return Items(last.brackets, tuple(Relation((names[0], one), ("=",)) for one in last.values))
        if isinstance(names[0], Items) and len(names[0].values) == len(last.values):
            pairs = zip(names[0].values, last.values, strict=True)
            return Items("", tuple(Relation(pair, ("=",)) for pair in pairs))
    return None


def _is_definition(relation: Relation) -> bool:
    names = relation.parts[0].values if isinstance(relation.parts[0], Items) else (relation.parts[0],)
    return set(relation.signs) <= set(EQUALS) and all(_is_name(name) for name in names)


def _is_name(value: Value) -> bool:
    return isinstance(value, Words) or (isinstance(value, Scalar) and NAME.fullmatch(value.text) is not None)


def _name(relation: Relation) -> str:
    return _squeeze(repr(relation.parts[0]))


def _has_free_left_side(relation: Relation) -> bool:
    """m + n = 7 names 7, and so does 3 + 4 = 7; 3x = 7 and x + 3 = 7 are equations for x."""
    first = relation.parts[0]
    letters = (
        set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", first.text))) if isinstance(first, Scalar) else set()
    )
    return isinstance(first, Scalar) and len(letters) != 1


def _has_inequality(value: Value) -> bool:
    if isinstance(value, Items):
        return any(_has_inequality(one) for one in value.values)
    return isinstance(value, Relation) and bool(set(value.signs) & set(MIRRORED))


def _brackets(items: Items, policy: Policy) -> str:
    return "" if items.brackets == "&" or (items.brackets == "{}" and policy.sets == "list") else items.brackets


def _squeeze(text: str) -> str:
    """Without spaces; words without case, single letters with theirs."""
    squeezed = re.sub(r"\s+", "", text)
    return squeezed.lower() if re.search("[A-Za-z]{2}", squeezed) and "\\" not in squeezed else squeezed
