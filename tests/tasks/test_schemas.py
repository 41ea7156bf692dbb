"""Rows of the published sets, as they are published, and rows that are not."""

from __future__ import annotations

import re

import pytest
from tasks.published import (
    AIME_H4_SCHEMA,
    AIME_MJ_SCHEMA,
    DAPO_SCHEMA,
    DOLCI_SCHEMA,
    GSM8K_SCHEMA,
    MATH_SCHEMA,
    aime_h4_row,
    aime_mj_row,
    dapo_row,
    dolci_row,
    gsm8k_row,
    math_row,
)

from steadyrl.tasks.schemas import BadRow, find_schema, identity, named_columns


def read(columns, row: dict) -> tuple[str, str]:
    schema = find_schema(columns)
    assert schema is not None
    return schema.read({name: row[name] for name in schema.columns})  # a file gives these columns only


@pytest.mark.parametrize(
    ("schema", "row", "expected"),
    [
        (DAPO_SCHEMA, dapo_row("What is 1+1?", "2"), ("What is 1+1?", "2")),
        (DAPO_SCHEMA, {**dapo_row("x", "2"), "prompt": [{"role": "user", "content": "Bare?"}]}, ("Bare?", "2")),
        (DOLCI_SCHEMA, dolci_row("What is 1+1?", "2"), ("What is 1+1?", "2")),
        (DOLCI_SCHEMA, dolci_row("user: What is 1+1?", "2"), ("What is 1+1?", "2")),
        (AIME_H4_SCHEMA, aime_h4_row("Find $n$.", "033"), ("Find $n$.", "033")),
        (AIME_MJ_SCHEMA, aime_mj_row("Find $n$.", 33), ("Find $n$.", "33")),
        (GSM8K_SCHEMA, gsm8k_row("How many eggs?", "18"), ("How many eggs?", "18")),
        (GSM8K_SCHEMA, gsm8k_row("How much?", "1,450"), ("How much?", "1,450")),
        (MATH_SCHEMA, math_row("Solve.", r"First \boxed{1}, then $\boxed{\frac{1}{2}}$."), ("Solve.", r"\frac{1}{2}")),
        (MATH_SCHEMA, math_row("Solve.", r"Thus it is $\boxed 2$."), ("Solve.", "2")),
        (MATH_SCHEMA, math_row("Solve.", r"Thus \fbox{6}."), ("Solve.", "6")),
    ],
)
def test_published_rows(schema, row: dict, expected: tuple[str, str]):
    assert read(schema.names, row) == expected


def test_messages_in_the_place_of_a_prompt():
    row = {"messages": [{"role": "user", "content": "What is 1+1?"}], "ground_truth": ["2"], "dataset": "math"}
    assert read(row, row) == ("What is 1+1?", "2")


def test_a_set_with_answers_is_not_read_by_its_solutions():
    """MATH-500 and AIME have both; the solution's box of the row below is not its answer."""
    assert read(AIME_H4_SCHEMA.names, {**aime_h4_row("p", "7"), "solution": r"\boxed{8}"}) == ("p", "7")


@pytest.mark.parametrize(
    ("schema", "change", "reason"),
    [
        (DAPO_SCHEMA, {"reward_model": None}, "reward_model.ground_truth is missing"),
        (DAPO_SCHEMA, {"reward_model": {"ground_truth": None}}, "reward_model.ground_truth is missing"),
        (DAPO_SCHEMA, {"reward_model": {"ground_truth": "  "}}, "the answer is empty"),
        (DAPO_SCHEMA, {"prompt": []}, "messages of none; one of the user alone is needed"),
        (
            DAPO_SCHEMA,
            {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
            "system, user",
        ),
        (DAPO_SCHEMA, {"prompt": ["text"]}, "neither a text nor a list of messages"),
        (DAPO_SCHEMA, {"prompt": [{"role": "user", "content": None}]}, "the message is missing"),
        (DAPO_SCHEMA, dapo_row("", "1"), "the problem is empty"),
    ],
)
def test_bad_dapo_rows(schema, change: dict, reason: str):
    with pytest.raises(BadRow, match=re.escape(reason)):
        read(schema.names, {**dapo_row("p", "1"), **change})


@pytest.mark.parametrize(
    ("schema", "row", "reason"),
    [
        (DOLCI_SCHEMA, {"prompt": None, "ground_truth": "1", "dataset": ""}, "prompt is missing"),
        (DOLCI_SCHEMA, {"prompt": "p", "ground_truth": ["1", "2"], "dataset": ""}, "list of 2 answers"),
        (DOLCI_SCHEMA, {"prompt": "p", "ground_truth": True, "dataset": ""}, "the answer is no text but bool"),
        (GSM8K_SCHEMA, {"question": "q", "answer": "18"}, 'the answer has no "####"'),
        (GSM8K_SCHEMA, {"question": "q", "answer": "18 ####"}, "the answer is empty"),
        (MATH_SCHEMA, math_row("p", "no box here"), r"the solution has no \boxed{...}"),
        (MATH_SCHEMA, math_row("p", r"\boxed{1"), r"the solution has no \boxed{...}"),
        (AIME_MJ_SCHEMA, {"Problem": 5, "Answer": 1}, "the problem is no text but int"),
    ],
)
def test_bad_rows(schema, row: dict, reason: str):
    with pytest.raises(BadRow, match=re.escape(reason)):
        read(schema.names, row)


def test_columns_by_name_may_be_nested_and_numbers():
    schema = named_columns("task.text", "task.gold")
    assert schema.columns == ("task",)
    assert schema.read({"task": {"text": "Find x.", "gold": 4.0}}) == ("Find x.", "4")
    assert schema.read({"task": {"text": "Find x.", "gold": 0.5}}) == ("Find x.", "0.5")
    with pytest.raises(BadRow, match=r"task\.gold is missing"):
        schema.read({"task": {"text": "Find x."}})


def test_unknown_columns_have_no_schema():
    assert find_schema(["text", "label"]) is None


def test_problems_are_the_same_but_for_white_space_and_unicode_forms():
    assert identity("Find\n  $x$. ") == identity("Find $x$.")
    assert identity("caf\u00e9") == identity("cafe\u0301")
    assert identity("Find $X$.") != identity("Find $x$.")
    assert identity("1 2") != identity("12")
