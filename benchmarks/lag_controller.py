"""Does the lag controller hold its budget when the learning rate is tripled in mid-run?

    python benchmarks/lag_controller.py [--steps 120] [--budget 0.02] [--out FILE.md] [--figure FILE.png]

The bundled model in the streaming regime, in one process, so that the numbers repeat. In the middle of the run the
learning rate is tripled, behind the back of the recipe. Once with the controller and once without: d-bar over the
budget, and what the controller set. Both runs see the same prompts and random numbers until the controller first acts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean
from unittest import mock

from steadyrl.config import RunConfig, TrainerConfig
from steadyrl.recipe import load_config
from steadyrl.reports.recorder import read_run
from steadyrl.run import train
from steadyrl.trainer import learner, optim

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny_streaming.toml"
FACTOR = 3
WINDOW = 10  # optimizer steps that are averaged
SETTINGS = [
    "pipeline.backend=inline",
    "pipeline.prompts_per_batch=12",
    "pipeline.lag=4",  # between two broadcasts, to begin with
    "pipeline.groups_in_flight=48",
    "engine.max_sequences=128",
    "trainer.lr=1e-4",
    "evaluation.every_steps=0",
    "evaluation.prompts=32",
    "evaluation.samples_per_prompt=4",
    "record.rollouts_every_batches=0",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--budget", type=float, default=0.02)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        controller = f'pipeline.controller={{ measure = "d_bar", budget = {options.budget}, every_steps = 5 }}'
        fixed = [*SETTINGS, f"trainer.steps={options.steps}"]
        rows = {
            "without": run(load_config(RECIPE, [*fixed, f"run_dir={folder}/without"])),
            "with": run(load_config(RECIPE, [*fixed, f"run_dir={folder}/with", controller])),
        }
    lines = table(rows, options.steps, options.budget)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.figure:
        draw(rows, options.steps, options.budget, options.figure)


def run(config: RunConfig) -> list[dict[str, float]]:
    """The metrics of every step of a run whose learning rate is tripled half-way."""
    half = config.trainer.steps // 2

    def tripled(trainer: TrainerConfig, step: int) -> float:
        return optim.learning_rate(trainer, step) * (FACTOR if step >= half else 1)

    with mock.patch.object(learner, "learning_rate", tripled):
        folder = train(config).folder
    return [row["metrics"] for row in read_run(folder).steps]


def table(rows: dict[str, list[dict[str, float]]], steps: int, budget: float) -> list[str]:
    lines = [
        f"Streaming on the bundled model, learning rate x {FACTOR} after step {steps // 2}, d-bar budget {budget:g} "
        "(`python benchmarks/lag_controller.py`).",
        "",
        "| steps | d-bar without | d-bar with | lag without | lag with | groups in flight with | broadcast every |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for start in range(0, steps, WINDOW):
        plain, steered = (rows[name][start : start + WINDOW] for name in ("without", "with"))
        cells = [
            f"{start + 1}-{start + len(steered)}",
            *(f"{mean(part, 'mismatch/d_bar'):.4f}" for part in (plain, steered)),
            *(f"{mean(part, 'staleness/lag'):.2f}" for part in (plain, steered)),
            f"{mean(steered, 'stream/groups_in_flight_limit'):.0f}",
            f"{mean(steered, 'stream/broadcast_every'):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def mean(rows: list[dict[str, float]], name: str) -> float:
    return fmean(row[name] for row in rows)


def draw(rows: dict[str, list[dict[str, float]]], steps: int, budget: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    for name, metrics in rows.items():
        smooth = [mean(metrics[max(0, i - WINDOW + 1) : i + 1], "mismatch/d_bar") for i in range(len(metrics))]
        top.plot(range(1, steps + 1), smooth, label=f"{name} controller")
        bottom.plot(range(1, steps + 1), [row["staleness/lag"] for row in metrics], label=f"{name} controller")
    top.axhline(budget, color="gray", linestyle="--", label="budget")
    for axes in (top, bottom):
        axes.axvline(steps // 2 + 0.5, color="gray", linewidth=0.8)
    top.set_ylabel(f"d-bar, mean of {WINDOW} steps")
    top.legend(frameon=False)
    bottom.set_ylabel("mean lag, optimizer steps")
    bottom.set_xlabel(f"optimizer step; the learning rate is tripled after step {steps // 2}")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
