"""Runs in order: conditions in rows and columns, seeds inside, and what each run came to.

A *condition* is one choice per axis of a sweep, such as method and lag; the runs of a condition differ in their seed
alone. The first axis (or the one called "method") makes the rows, the others the columns, as in Table 1 of the paper
(arXiv 2607.18722).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadyrl.diagnostics.collapse import collapse_step
from steadyrl.errors import ConfigError
from steadyrl.reports.recorder import CONFIG, Row, RunData, read_run
from steadyrl.reports.summary import last_quarter, method, number, token_mean

SWEEP = "sweep.json"
VARIED = ("seed", "run_dir", "pipeline.regime", "pipeline.lag", "pipeline.max_lag")  # within a row of Table 1
KEPT = (  # metrics of a sweep's runs; with all of them a large sweep would not fit into memory
    "mismatch/d_bar",
    "mismatch/k3",
    "reward/mean",
    "sampled_tokens",
)


@dataclass(frozen=True)
class Cell:
    """One run of a condition, or the lack of it."""

    row: str
    column: str
    seed: int
    folder: Path
    run: RunData | None  # None where there is nothing to read
    problem: str | None = None  # why it is left out of means and comparisons

    @property
    def of_run(self) -> RunData:
        assert self.run is not None
        return self.run


@dataclass(frozen=True)
class Comparison:
    """Cells by row and column; every list in the order in which it is shown."""

    row_axis: str
    column_axis: str  # "" where there is one column only
    rows: list[str]
    columns: list[str]
    cells: list[Cell]

    def at(self, row: str, column: str) -> list[Cell]:
        """The cells of a condition whose runs are there, whole or not."""
        return [cell for cell in self.cells if (cell.row, cell.column) == (row, column) and cell.run is not None]

    def whole(self, row: str, column: str) -> dict[int, RunData]:
        """seed -> run of the cells that count in means; of two runs with one seed the later one."""
        return {cell.seed: cell.of_run for cell in self.at(row, column) if cell.problem is None}


@dataclass(frozen=True)
class Outcome:
    """What a run came to; None where the run has no such number."""

    base: float | None  # evaluation before the first step
    best: float | None  # highest evaluation after it
    best_se: float | None  # standard error over the held-out prompts
    final: float | None
    final_se: float | None
    d_bar: float | None  # mean over the tokens of the last quarter of the steps
    collapsed_at: int | None  # optimizer step


def outcome(run: RunData) -> Outcome:
    before = [row for row in run.evaluations if row["step"] == 0 and row["avg_at_k"] is not None]
    after = [row for row in run.evaluations if row["step"] > 0 and row["avg_at_k"] is not None]
    best = max(after, key=lambda row: row["avg_at_k"], default={})
    final = after[-1] if after else {}
    return Outcome(
        base=before[0]["avg_at_k"] if before else None,
        best=best.get("avg_at_k"),
        best_se=best.get("avg_at_k_se"),
        final=final.get("avg_at_k"),
        final_se=final.get("avg_at_k_se"),
        d_bar=token_mean(last_quarter(run.steps), "mismatch/d_bar"),
        collapsed_at=collapsed_at(run),
    )


def collapsed_at(run: RunData) -> int | None:
    """The step from which the evaluation score stays far below its best (`diagnostics.collapse`)."""
    points = {row["step"]: number(row["avg_at_k"]) for row in run.evaluations}
    steps = sorted(points)
    return collapse_step(steps, [points[step] for step in steps])


def compare_runs(runs: list[RunData]) -> Comparison:
    """Runs named one by one: a row per recipe, a column per lag; runs that differ in the seed alone go together."""
    recipes = [_recipe_without(run, *VARIED) for run in runs]
    labels: dict[str, str] = {}  # recipe -> label
    for run, recipe in zip(runs, recipes, strict=True):
        if recipe not in labels:
            name = method(run) + (" + R3" if run.config.get("model", {}).get("routing_replay") else "")
            labels[recipe] = f"{name} ({run.name})" if name in labels.values() else name
    lags = [_lag(run) for run in runs]
    cells = [
        Cell(labels[recipe], f"{kind} {size}", _seed(run), run.path, run)
        for run, recipe, (kind, size) in zip(runs, recipes, lags, strict=True)
    ]
    columns = [f"{kind} {size}" for kind, size in sorted(set(lags))]
    return Comparison("method", "lag", list(labels.values()), columns, cells)


def is_sweep(folder: Path) -> bool:
    return os.path.isfile(folder / SWEEP)


def read_sweep(folder: Path) -> Comparison:
    """The runs of a sweep, with those that are missing, unfinished or failed marked.

    Raises:
        ConfigError: if its index or one of its runs is damaged.
    """
    index = _read_index(folder / SWEEP)
    axes: dict[str, list[str]] = index["axes"]
    row_axis = "method" if "method" in axes else next(iter(axes))
    others = [name for name in axes if name != row_axis]
    cells = [_cell(folder, entry, row_axis, others) for entry in index["cells"]]
    # labels in the order of the axes, not in that of the cells
    columns = [""]
    for name in others:
        columns = [f"{before}{', ' * bool(before)}{_label(name, label)}" for before in columns for label in axes[name]]
    return Comparison(
        row_axis=row_axis,
        column_axis=", ".join(others),
        rows=_present(axes[row_axis], (cell.row for cell in cells)),
        columns=_present(columns, (cell.column for cell in cells)),
        cells=cells,
    )


def _cell(folder: Path, entry: dict[str, Any], row_axis: str, others: list[str]) -> Cell:
    labels, path = entry["labels"], folder / entry["folder"]
    column = ", ".join(_label(name, labels[name]) for name in others)
    cell = Cell(labels[row_axis], column, entry["seed"], path, None)
    if not os.path.isfile(path / CONFIG):
        return dataclasses.replace(cell, problem="not started")
    run = _slim(read_run(path))
    return dataclasses.replace(cell, run=run, problem=_problem(run))


def _problem(run: RunData) -> str | None:
    state, planned = run.status.get("state"), run.config.get("trainer", {}).get("steps")
    if state == "finished":
        return None
    steps = run.steps[-1]["step"] if run.steps else 0
    return f"{state if state in ('failed', 'stopped') else 'unfinished'} at step {steps} of {planned or '?'}"


def _slim(run: RunData) -> RunData:
    steps: list[Row] = [
        {**row, "metrics": {name: row["metrics"].get(name) for name in KEPT}, "histograms": {}} for row in run.steps
    ]
    return dataclasses.replace(run, steps=steps, timeline=[])


def _read_index(file: Path) -> dict[str, Any]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): run the sweep again, or report on its runs") from None
    if not _is_index(index):
        raise ConfigError(f"{file} is not the index of a sweep: run the sweep again, or report on its runs")
    return index


def _is_index(index: Any) -> bool:
    axes, cells = (index.get("axes"), index.get("cells")) if isinstance(index, dict) else (None, None)
    if not isinstance(axes, dict) or not axes or not isinstance(cells, list):
        return False
    if not all(isinstance(labels, list) and all(isinstance(x, str) for x in labels) for labels in axes.values()):
        return False
    return all(
        isinstance(cell, dict)
        and isinstance(cell.get("folder"), str)
        and isinstance(cell.get("seed"), int)
        and isinstance(cell.get("labels"), dict)
        and all(cell["labels"].get(name) in labels for name, labels in axes.items())
        for cell in cells
    )


def _label(axis: str, label: str) -> str:
    """A number needs the name of its axis: lag 8."""
    try:
        float(label)
    except ValueError:
        return label
    return f"{axis.rsplit('.', 1)[-1]} {label}"


def _present(labels: list[str], used: Iterable[str]) -> list[str]:
    known = set(used)
    return [label for label in labels if label in known]


def _recipe_without(run: RunData, *keys: str) -> str:
    recipe = json.loads(json.dumps(run.config, default=str))
    for key in keys:
        *parents, last = key.split(".")
        table = recipe
        for parent in parents:
            table = table.get(parent, {})
        table.pop(last, None)
    return json.dumps(recipe, sort_keys=True)


def _lag(run: RunData) -> tuple[str, int]:
    """The kind of lag that the recipe sets, and its size in optimizer steps."""
    pipeline = run.config.get("pipeline", {})
    kind = "max_lag" if pipeline.get("regime") == "streaming" else "lag"
    lag = pipeline.get(kind, 0)
    return kind.replace("_", " "), lag if isinstance(lag, int) else 0


def _seed(run: RunData) -> int:
    seed = run.config.get("seed", 0)
    return seed if isinstance(seed, int) and not math.isnan(seed) else 0
