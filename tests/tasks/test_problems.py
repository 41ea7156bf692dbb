"""Mixing sources: what is kept, what is counted, what is refused."""

from __future__ import annotations

import pytest
from tasks.published import (
    AIME_H4_SCHEMA,
    DAPO_SCHEMA,
    DOLCI_SCHEMA,
    GSM8K_SCHEMA,
    aime_h4_row,
    dapo_row,
    dolci_row,
    gsm8k_row,
    jsonl,
    parquet,
)

from steadyrl.errors import ConfigError
from steadyrl.task_config import DataSource
from steadyrl.tasks.problems import load_problems


def load(*sources: str, skip: bool = False, leave_out: frozenset[bytes] = frozenset(), split="train", **columns):
    given = [DataSource(source=source, **columns) for source in sources]
    return load_problems(given, split, skip_bad_rows=skip, leave_out=leave_out)


@pytest.fixture
def dapo(tmp_path) -> str:
    """Three problems, each repeated as the published file repeats them, one of them with a second answer."""
    rows = [dapo_row(f"Problem {i}?", str(i), index=str(i)) for i in (1, 2, 3)] * 4
    rows.append(dapo_row("Problem  2?\n", "22"))
    return parquet(tmp_path / "dapo.parquet", rows, DAPO_SCHEMA)


def test_repeated_rows_of_dapo_are_taken_once_and_counted(dapo):
    found = load(dapo)
    assert [(problem.text, problem.answer) for problem in found.problems] == [
        (f"Problem {i}?", str(i)) for i in (1, 2, 3)
    ]
    count = found.counts[0]
    assert (count.rows, count.kept, count.repeated, count.other_answer) == (13, 3, 10, 1)
    assert count.sentence() == (
        f"{dapo}: 13 rows, 3 different problems; left out 10 repeated "
        "(1 of them with another answer; the first one counts)"
    )


def test_every_row_is_accounted_for_across_sources(tmp_path, dapo):
    rows = [
        dolci_row("Problem 3?", "3"),
        dolci_row("New?", "4"),
        dolci_row("New?", "4"),
        dolci_row("Held out?", "5"),
        dolci_row("Bad?", ""),
    ]
    dolci = parquet(tmp_path / "dolci.parquet", rows, DOLCI_SCHEMA)
    test = load(parquet(tmp_path / "aime.parquet", [aime_h4_row("Held  out?", "5")], AIME_H4_SCHEMA), split="test")
    found = load(dapo, dolci, skip=True, leave_out=frozenset(test.keys()))
    assert [problem.text for problem in found.problems] == ["Problem 1?", "Problem 2?", "Problem 3?", "New?"]
    first, second = found.counts
    assert (second.rows, second.kept, second.repeated, second.in_earlier_source, second.in_test_set, second.bad) == (
        5,
        1,
        1,
        1,
        1,
        1,
    )
    for count in (first, second):
        assert count.rows == count.kept + count.repeated + count.in_earlier_source + count.in_test_set + count.bad
    assert found.bad_rows == [f"{dolci} row 5: the answer is empty"]
    assert found.problems[3].place == f"{dolci} row 2"


def test_bad_rows_are_refused_with_file_row_and_reason_or_skipped_and_named(tmp_path):
    rows = [{"problem": "p", "answer": "1"}, "{broken", {"problem": "q"}, {"problem": "r", "answer": "2"}]
    path = jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(ConfigError) as refused:
        load(path)
    message = str(refused.value)
    assert message.startswith(f"2 bad rows in {path}, mend them or set task.bad_rows=skip: {path} row 2: no JSON: ")
    assert message.endswith(f"{path} row 3: answer is missing")
    found = load(path, skip=True)
    assert [problem.answer for problem in found.problems] == ["1", "2"]
    assert [row.partition(": ")[0] for row in found.bad_rows] == [f"{path} row 2", f"{path} row 3"]


def test_many_bad_rows_are_counted_and_the_first_ones_named(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"problem": "p", "answer": "1"}, *[{"problem": "q", "answer": ""}] * 50])
    found = load(path, skip=True)
    assert (found.counts[0].bad, len(found.bad_rows)) == (50, 20)
    with pytest.raises(ConfigError, match=r"^50 bad rows .*row 4: the answer is empty; \.\.\.$"):
        load(path)


def test_a_source_without_any_problem_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no problem in 1 rows"):
        load(jsonl(tmp_path / "x.jsonl", [{"problem": "", "answer": ""}]), skip=True)


def test_columns_by_name(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"text": "p", "gold": {"value": 3}}])
    assert load(path, problem="text", answer="gold.value").problems[0].answer == "3"
    with pytest.raises(ConfigError, match=r"has the columns text, gold, which no published set has: name two of them"):
        load(path)
    with pytest.raises(ConfigError, match="has no column 'solution'; its columns are text, gold"):
        load(path, problem="text", answer="solution")
    bare = jsonl(tmp_path / "bare.jsonl", [{"question": "q", "answer": "18"}])
    with pytest.raises(ConfigError, match='has no "####" before its number'):
        load(bare)
    assert load(bare, problem="question", answer="answer").problems[0].answer == "18"


def test_one_of_two_column_names_is_refused():
    with pytest.raises(ValueError, match="needs the names of both columns"):
        DataSource(source="x.jsonl", problem="text")


def test_the_checksum_is_of_problems_and_answers_in_their_order(tmp_path):
    rows = [gsm8k_row("a", "1"), gsm8k_row("b", "2")]
    one = load(parquet(tmp_path / "1.parquet", rows, GSM8K_SCHEMA)).checksum
    in_two_files = [jsonl(tmp_path / "two" / f"{i}.jsonl", [row]) for i, row in enumerate(rows)]
    assert load(str(tmp_path / "two")).checksum == load(*in_two_files).checksum == one
    assert load(parquet(tmp_path / "2.parquet", rows[::-1], GSM8K_SCHEMA)).checksum != one
    assert load(parquet(tmp_path / "3.parquet", [rows[0], gsm8k_row("b", "3")], GSM8K_SCHEMA)).checksum != one
