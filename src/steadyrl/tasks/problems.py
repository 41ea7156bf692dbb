"""Problems of several sources as one list: repeated ones taken once, bad rows named, everything counted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from steadyrl.errors import ConfigError
from steadyrl.task_config import DataSource
from steadyrl.tasks.base import Split, checksum
from steadyrl.tasks.schemas import BadRow, Row, Schema, find_schema, identity, named_columns
from steadyrl.tasks.sources import DataFile, find_files, read_columns, read_rows

SHOWN_BAD_ROWS = 20  # that are named one by one


@dataclass(frozen=True)
class Problem:
    text: str
    answer: str
    source: str  # as the recipe names it
    place: str  # file and row it was read from


@dataclass
class SourceCount:
    """Where the rows of one source went: rows = kept + repeated + in_earlier_source + in_test_set + bad."""

    source: str
    files: list[str] = field(default_factory=list)
    rows: int = 0
    kept: int = 0
    repeated: int = 0  # the same problem stood in an earlier row of this source
    in_earlier_source: int = 0
    in_test_set: int = 0
    bad: int = 0
    other_answer: int = 0  # of the repeated ones and those in an earlier source: their answer is another one

    def sentence(self) -> str:
        gone = {
            "repeated": self.repeated,
            "in an earlier source": self.in_earlier_source,
            "in the test set": self.in_test_set,
            "bad": self.bad,
        }
        left_out = ", ".join(f"{count:,} {why}" for why, count in gone.items() if count)
        other = (
            f" ({self.other_answer:,} of them with another answer; the first one counts)" if self.other_answer else ""
        )
        return f"{self.source}: {self.rows:,} rows, {self.kept:,} different problems" + (
            f"; left out {left_out}{other}" if left_out else ""
        )


@dataclass(frozen=True)
class ProblemSet:
    problems: list[Problem]
    counts: list[SourceCount]
    bad_rows: list[str]  # the first SHOWN_BAD_ROWS, with their reasons

    @property
    def checksum(self) -> str:
        """Of problems and answers in their order: equal checksum, equal prompts at equal positions."""
        return checksum(text for problem in self.problems for text in (problem.text, problem.answer))

    def as_json(self) -> dict[str, Any]:
        return {
            "problems": len(self.problems),
            "checksum": self.checksum,
            "sources": [asdict(count) for count in self.counts],
            "bad_rows": self.bad_rows,
        }

    def keys(self) -> set[bytes]:
        """What makes each problem itself, for `load_problems`."""
        return {_key(problem.text) for problem in self.problems}


def load_problems(
    sources: Sequence[DataSource], split: Split, *, skip_bad_rows: bool, leave_out: frozenset[bytes] = frozenset()
) -> ProblemSet:
    """Read sources in order. Of equal problems the first is kept; those of `leave_out` are not.

    Rows are streamed: memory grows with the different problems, not with the rows.

    Raises:
        ConfigError: a source is missing or unreadable, has no known columns or no problem, or, unless they are
            skipped, has bad rows.
    """
    kept: dict[bytes, tuple[int, str]] = {}  # key -> which source, answer
    problems: list[Problem] = []
    counts: list[SourceCount] = []
    bad_rows: list[str] = []
    for number, source in enumerate(sources):
        count = SourceCount(source.source)
        counts.append(count)
        for place, row in _read(source, split, count):
            count.rows += 1
            if isinstance(row, BadRow):
                count.bad += 1
                if len(bad_rows) < SHOWN_BAD_ROWS:
                    bad_rows.append(f"{place}: {row}")
                continue
            text, answer = row
            key = _key(text)
            if key in leave_out:
                count.in_test_set += 1
            elif key in kept:
                first_number, first_answer = kept[key]
                count.repeated += first_number == number
                count.in_earlier_source += first_number != number
                count.other_answer += answer != first_answer
            else:
                kept[key] = (number, answer)
                count.kept += 1
                problems.append(Problem(text, answer, source.source, place))
        if count.bad and not skip_bad_rows:
            raise ConfigError(
                f"{count.bad} bad rows in {source.source}, mend them or set task.bad_rows=skip: "
                f"{'; '.join(bad_rows[:3])}{'; ...' if count.bad > 3 else ''}"
            )
        if count.rows == count.bad:
            raise ConfigError(f"{source.source} has no problem in {count.rows} rows: name another source")
    return ProblemSet(problems, counts, bad_rows)


def _read(source: DataSource, split: Split, count: SourceCount) -> Iterator[tuple[str, tuple[str, str] | BadRow]]:
    """(file and row, problem and answer or what is wrong) of all files of a source."""
    for file in find_files(source.source, split):
        count.files.append(file.name)
        schema = _schema(source, file)
        for number, row in read_rows(file, schema.columns):
            yield f"{file.name} row {number}", _checked(row, schema)


def _checked(row: Row | BadRow, schema: Schema) -> tuple[str, str] | BadRow:
    if isinstance(row, BadRow):
        return row
    assert isinstance(row, Mapping)
    try:
        return schema.read(row)
    except BadRow as bad:
        return bad


def _schema(source: DataSource, file: DataFile) -> Schema:
    columns = read_columns(file)
    if source.problem:
        schema = named_columns(source.problem, source.answer)
        missing = [name for name in schema.columns if name not in columns]
        if missing:
            raise ConfigError(
                f"{file.name} has no column {missing[0]!r}; its columns are {', '.join(columns) or 'none'}"
            )
        return schema
    schema = find_schema(columns)
    if schema is None:
        raise ConfigError(
            f"{file.name} has the columns {', '.join(columns) or 'none'}, which no published set has: "
            "name two of them as problem and answer of the source"
        )
    return schema


def _key(problem: str) -> bytes:
    return hashlib.blake2b(identity(problem).encode("utf-8", "surrogatepass"), digest_size=16).digest()
