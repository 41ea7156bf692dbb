"""The tables of a report, as rows of text for a page and Markdown, and as numbers for CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from steadyrl.reports.comparison import Comparison, Outcome, outcome
from steadyrl.statistics import MeanInterval, PairedDifference, mean_interval, paired_difference, rank_table

ROWS_IN_SIGHT = 12  # of a table of pairs; a longer one is folded


@dataclass(frozen=True)
class Table:
    name: str  # of its files
    head: list[str]
    rows: list[list[str]]
    columns: tuple[str, ...]  # of the CSV
    numbers: list[tuple[Any, ...]]
    groups: list[tuple[str, int]] = field(default_factory=list)  # headings over several columns
    is_folded: bool = False
    caption: str = ""


def score_table(comparison: Comparison) -> Table | None:
    """Table 1 of the paper: best and final score and last-quarter d-bar, with 95 % intervals over seeds.

    A star marks conditions in which seeds collapsed, and how many of how many. Runs that are not whole are left out.
    """
    outcomes = _outcomes(comparison)
    if not any(outcomes.values()):
        return None
    columns = comparison.columns
    most = max(map(len, outcomes.values()))
    quantities: list[tuple[str, Callable[[dict[int, Outcome]], str], str]] = [
        ("best score", lambda seeds: _score(seeds, "best") + _marks(seeds, most), "best"),
        ("final score", lambda seeds: _score(seeds, "final"), "final"),
        ("d-bar, last quarter", lambda seeds: _interval_text(_values(seeds, "d_bar"), ".4f"), "d_bar"),
    ]
    rows = [
        [row, *(text(outcomes[row, column]) for _, text, _ in quantities for column in columns)]
        for row in comparison.rows
    ]
    bases = [base for seeds in outcomes.values() for one in seeds.values() if (base := one.base) is not None]
    if bases:
        start = f"{sum(bases) / len(bases):.3f}"
        rows.insert(0, ["before training", *([start] * len(columns)), *(["-"] * 2 * len(columns))])
    numbers = []
    for (row, column), seeds in outcomes.items():
        intervals = [_interval_numbers(_values(seeds, name)) for _, _, name in quantities]
        collapsed = sum(one.collapsed_at is not None for one in seeds.values())
        numbers.append((row, column, len(seeds), collapsed, *(value for part in intervals for value in part)))
    parts = [f"{name} {part}" for name, _, _ in quantities for part in ("mean", "low", "high")]
    is_grouped = len(columns) > 1
    return Table(
        name="table-1",
        head=[comparison.row_axis, *(columns * 3 if is_grouped else [name for name, _, _ in quantities])],
        rows=rows,
        columns=(comparison.row_axis, comparison.column_axis or "column", "seeds", "collapsed", *parts),
        numbers=numbers,
        groups=[("", 1), *((name, len(columns)) for name, _, _ in quantities)] if is_grouped else [],
    )


def pair_table(comparison: Comparison) -> Table | None:
    """Every two rows in every column, later minus earlier, on the seeds that both have: best score and d-bar."""
    outcomes = _outcomes(comparison)
    rows, numbers = [], []
    for column in comparison.columns:
        for first, second in combinations(comparison.rows, 2):
            score = _difference(outcomes[second, column], outcomes[first, column], "best")
            drift = _difference(outcomes[second, column], outcomes[first, column], "d_bar")
            if score is None:
                continue
            name = f"{second} - {first}"
            rows.append(
                [name, column, str(score.count), *_difference_text(score, ".3f"), *_difference_text(drift, ".4f")]
            )
            numbers.append(
                (second, first, column, score.count, *_difference_numbers(score), *_difference_numbers(drift))
            )
    if not rows:
        return None
    parts = [f"{what} {part}" for what in ("best score", "d-bar") for part in ("difference", "low", "high", "p")]
    head = ["difference", comparison.column_axis, "seeds", "best score", "p", "d-bar, last quarter", "p"]
    has_columns = comparison.column_axis != ""
    return Table(
        name="pairs",
        head=head if has_columns else [head[0], *head[2:]],
        rows=rows if has_columns else [[row[0], *row[2:]] for row in rows],
        columns=("row", "minus", comparison.column_axis or "column", "seeds", *parts),
        numbers=numbers,
        is_folded=len(rows) > ROWS_IN_SIGHT,
    )


def ranks(comparison: Comparison) -> Table | None:
    """Mean rank of each row by best score, over the seeds that every row has."""
    outcomes = _outcomes(comparison)
    found: dict[str, dict[str, tuple[str, tuple[float, float, float]]]] = {row: {} for row in comparison.rows}
    for column in comparison.columns:
        scores = {row: _by_seed(outcomes[row, column], "best") for row in comparison.rows}
        scores = {row: seeds for row, seeds in scores.items() if seeds}
        shared = sorted(set.intersection(*map(set, scores.values()))) if scores else []
        if len(scores) < 2 or not shared:
            continue
        for rank in rank_table({row: [seeds[seed] for seed in shared] for row, seeds in scores.items()}):
            text = f"{rank.mean:.2f}" + _brackets(rank.low, rank.high, ".1f")
            found[rank.name][column] = (text, (rank.mean, rank.low, rank.high))
    if not any(found.values()):
        return None
    return Table(
        name="ranks",
        head=[comparison.row_axis, *(column or "mean rank" for column in comparison.columns)],
        rows=[
            [row, *(at[column][0] if column in at else "-" for column in comparison.columns)]
            for row, at in found.items()
        ],
        columns=(comparison.row_axis, comparison.column_axis or "column", "mean rank", "low", "high"),
        numbers=[(row, column, *values) for row, at in found.items() for column, (_, values) in at.items()],
        caption="Mean rank by best score, over the seeds that every row has; 1 is the best.",
    )


def cells_table(comparison: Comparison) -> Table:
    """Which runs a sweep has, where they are, and what became of them."""
    rows, numbers = [], []
    for cell in comparison.cells:
        one = outcome(cell.run) if cell.run is not None else None
        state = cell.problem or "finished"
        fixed = [cell.row, *([cell.column] if comparison.column_axis else []), str(cell.seed), state]
        best, collapsed = one and one.best, one and one.collapsed_at
        rows.append([*fixed, "-" if best is None else f"{best:.3f}", str(collapsed or "-"), str(cell.folder)])
        numbers.append((cell.row, cell.column, cell.seed, state, best, collapsed, str(cell.folder)))
    axes = [comparison.row_axis, *([comparison.column_axis] if comparison.column_axis else [])]
    return Table(
        name="runs",
        head=[*axes, "seed", "state", "best score", "collapsed at step", "folder"],
        rows=rows,
        columns=(
            comparison.row_axis,
            comparison.column_axis or "column",
            "seed",
            "state",
            "best score",
            "collapsed at step",
            "folder",
        ),
        numbers=numbers,
        is_folded=len(rows) > ROWS_IN_SIGHT,
    )


def markdown(table: Table) -> str:
    """A Markdown table; grouped headings become part of each column's own."""
    prefixes = [name for name, size in table.groups for _ in range(size)] or [""] * len(table.head)
    head = [f"{prefix}, {name}" if prefix else name for prefix, name in zip(prefixes, table.head, strict=True)]
    lines = [head, ["---"] * len(head), *table.rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Comma-separated values; a number that is not finite is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_plain(value) for value in row] for row in rows)
    return text.getvalue()


def _outcomes(comparison: Comparison) -> dict[tuple[str, str], dict[int, Outcome]]:
    """Condition -> seed -> outcome, whole runs only."""
    return {
        (row, column): {seed: outcome(run) for seed, run in comparison.whole(row, column).items()}
        for row in comparison.rows
        for column in comparison.columns
    }


def _by_seed(seeds: dict[int, Outcome], name: str) -> dict[int, float]:
    return {seed: value for seed, one in seeds.items() if (value := getattr(one, name)) is not None}


def _values(seeds: dict[int, Outcome], name: str) -> list[float]:
    return list(_by_seed(seeds, name).values())


def _score(seeds: dict[int, Outcome], name: str) -> str:
    """Mean and interval over seeds; of one run, the standard error over the held-out prompts."""
    values = _values(seeds, name)
    if len(values) != 1:
        return _interval_text(values, ".3f")
    errors = _values(seeds, f"{name}_se")
    return f"{values[0]:.3f}" + (f" \u00b1 {errors[0]:.3f}" if errors else "")


def _marks(seeds: dict[int, Outcome], most: int) -> str:
    """A star with the share of collapses, and the number of seeds where others have more."""
    count = sum(one.collapsed_at is not None for one in seeds.values())
    star = "*" if len(seeds) == 1 else f" * {count}/{len(seeds)}"
    return star * (count > 0) + f" ({len(seeds)} seeds)" * (0 < len(seeds) < most)


def _interval_text(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    found = mean_interval(values)
    return format(found.mean, form) + _brackets(found.low, found.high, form)


def _interval_numbers(values: Sequence[float]) -> tuple[float | None, ...]:
    found = mean_interval(values) if values else MeanInterval(math.nan, math.nan, math.nan, 0.95, 0)
    return found.mean, found.low, found.high


def _difference(first: dict[int, Outcome], second: dict[int, Outcome], name: str) -> PairedDifference | None:
    left, right = _by_seed(first, name), _by_seed(second, name)
    shared = sorted(left.keys() & right.keys())
    return paired_difference([left[seed] for seed in shared], [right[seed] for seed in shared]) if shared else None


def _difference_text(found: PairedDifference | None, form: str) -> list[str]:
    if found is None:
        return ["-", "-"]
    p = "-" if found.count == 1 else f"{found.p_value:.3g}"
    return [format(found.mean, "+" + form) + _brackets(found.low, found.high, "+" + form), p]


def _difference_numbers(found: PairedDifference | None) -> tuple[float | None, ...]:
    return (None,) * 4 if found is None else (found.mean, found.low, found.high, found.p_value)


def _brackets(low: float, high: float, form: str) -> str:
    return "" if math.isnan(low) else f" [{format(low, form)}, {format(high, form)}]"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("*", "\\*")


def _plain(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
