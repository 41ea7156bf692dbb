"""d-bar, evaluation and intervention rate at two lags, with and without routing replay, with and without SAT.

    python benchmarks/staleness_grid.py OUT [--seeds 3] [--jobs 2] [--figure FILE.svg]

Runs recipes/tiny.toml for each objective x lag x replay x seed with the inline backend, one core a run,
prints a table of means over the seeds with standard errors, and draws the runs with replay. A cell that
is finished in OUT is not run again, so the script can be stopped and started.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from steadyrl.reports.recorder import read_run
from steadyrl.reports.summary import summary, token_mean

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.toml"
OBJECTIVES = ("gspo", "sat-gspo")
LAGS = (1, 8)
REPLAY = (False, True)
WINDOW = 8  # optimizer steps that the drawn d-bar is averaged over: one interval between broadcasts at lag 8
Cell = tuple[str, int, bool, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    cells = list(itertools.product(OBJECTIVES, LAGS, REPLAY, range(options.seeds)))
    cells.sort(key=lambda cell: cell[3])  # a whole grid of one seed first
    with ThreadPoolExecutor(options.jobs) as pool:
        for cell in pool.map(lambda cell: run(options.out, cell), cells):
            print(f"done: {folder_of(options.out, cell).name}", file=sys.stderr, flush=True)
    print(table(options.out, options.seeds))
    if options.figure:
        draw(options.out, options.seeds, options.figure)


def folder_of(out: Path, cell: Cell) -> Path:
    objective, lag, replay, seed = cell
    return out / f"{objective}_lag{lag}_{'r3' if replay else 'plain'}_seed{seed}"


def run(out: Path, cell: Cell) -> Cell:
    folder = folder_of(out, cell)
    if is_finished(folder):
        return cell
    shutil.rmtree(folder, ignore_errors=True)
    objective, lag, replay, seed = cell
    overrides = [
        f"run_dir={folder}",
        f"seed={seed}",
        f"objective.preset={objective}",
        f"objective.boundary.rule={'sat' if objective.startswith('sat') else 'clip'}",
        f"pipeline.lag={lag}",
        f"model.routing_replay={str(replay).lower()}",
        "pipeline.backend=inline",
    ]
    command = [sys.executable, "-c", "from steadyrl.cli import main; main()", "train", str(RECIPE), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return cell


def is_finished(folder: Path) -> bool:
    status = folder / "status.json"
    return status.exists() and json.loads(status.read_text())["state"] == "finished"


def table(out: Path, seeds: int) -> str:
    lines = [
        "| objective | lag | R3 | d-bar | d-bar, last quarter | final avg@8 | best avg@8 | gate | intervention |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for objective, lag, replay in itertools.product(OBJECTIVES, LAGS, REPLAY):
        measured = [numbers(folder_of(out, (objective, lag, replay, seed))) for seed in range(seeds)]
        values = [with_error([one[name] for one in measured]) for name in measured[0]]
        lines.append(f"| {objective} | {lag} | {'yes' if replay else 'no'} | {' | '.join(values)} |")
    return "\n".join(lines)


def numbers(folder: Path) -> dict[str, Any]:
    run = read_run(folder)
    closing = summary(run)
    return {
        "d_bar": closing["d_bar"],
        "d_bar_last": token_mean(run.steps[-(len(run.steps) // 4) :], "mismatch/d_bar"),
        "final": closing["evaluation_after"],
        "best": max(row["avg_at_k"] for row in run.evaluations),
        "gate": closing["gate_rate"],
        "intervention": closing["intervention_rate"],
    }


def draw(out: Path, seeds: int, file: Path) -> None:
    """Evaluation and d-bar over training, mean over the seeds, one line for each objective and lag."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (score, drift) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    colours = {("gspo", 1): "#9ecae1", ("gspo", 8): "#fdae6b", ("sat-gspo", 1): "#2171b5", ("sat-gspo", 8): "#d94801"}
    for (objective, lag), colour in colours.items():
        runs = [read_run(folder_of(out, (objective, lag, True, seed))) for seed in range(seeds)]
        label = f"{objective}, lag {lag}"
        scores = np.array([[row["avg_at_k"] for row in run.evaluations] for run in runs])
        error = scores.std(0, ddof=1) / math.sqrt(seeds) if seeds > 1 else np.zeros(scores.shape[1])
        steps = [row["version"] for row in runs[0].evaluations]
        score.errorbar(steps, scores.mean(0), error, color=colour, label=label, capsize=2, linewidth=1.6)
        d_bar = np.array([[row["metrics"]["mismatch/d_bar"] for row in run.steps] for run in runs]).mean(0)
        smooth = np.convolve(d_bar, np.ones(WINDOW) / WINDOW, "valid")
        drift.plot(range(WINDOW, len(d_bar) + 1), smooth, color=colour, linewidth=1.6)
    score.set_title("evaluation avg@8", loc="left", fontsize=10)
    drift.set_title("d-bar: mean |log ratio| to the policy that sampled", loc="left", fontsize=10)
    drift.set_yscale("log")
    score.legend(frameon=False, fontsize=8)
    for axes in (score, drift):
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def with_error(values: list[float | None]) -> str:
    """Mean and standard error over the seeds; "-" where the objective has no such number."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    error = statistics.stdev(present) / math.sqrt(len(present)) if len(present) > 1 else 0.0
    return f"{statistics.fmean(present):.4f} +- {error:.4f}"


if __name__ == "__main__":
    main()
