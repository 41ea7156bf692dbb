"""Does `steadyrl plan` predict the time of an optimizer step? Three tiny runs against predictions from recorded ones.

    python benchmarks/plan_vs_runs.py [--steps 36] [--repeats 1]

From a recorded batch-wise run at lag 2, and with nothing known about the others, the time of a step is predicted for a
synchronous run, a batch-wise run at lag 4, and a streaming run, each with another seed. The speed of a machine changes
from minute to minute, so a run is recorded before and after each of the three, and what the two predict is averaged;
a first run is for nothing but to warm up. All of them have the engine in a process of its own, so two cores have to be
free. Prints a table in Markdown, for benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steadyrl.planning.measure import measured_speed
from steadyrl.planning.model_count import count_model
from steadyrl.planning.simulate import simulate
from steadyrl.planning.trainer_clock import Prediction
from steadyrl.recipe import load_config

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.toml"
FIXED = [
    "evaluation.every_steps=0",
    "evaluation.prompts=4",
    "evaluation.samples_per_prompt=1",
    "pipeline.backend=process",
]
SYNC = ["pipeline.regime=sync", "pipeline.lag=0"]
RECORDED = ["pipeline.regime=batch", "pipeline.lag=2", "seed=11", "record.rollouts_every_batches=2"]
WARM_UP_STEPS = 8
PREDICTED = {
    "synchronous": [*SYNC, "seed=12"],
    "batch-wise, lag 4": ["pipeline.regime=batch", "pipeline.lag=4", "seed=13"],
    "streaming, lag at most 8": ["pipeline.regime=streaming", "pipeline.lag=1", "pipeline.max_lag=8", "seed=14"],
}


@dataclass(frozen=True)
class Outcome:
    """A run beside its prediction."""

    name: str
    predicted: tuple[Prediction, Prediction]  # from the runs recorded before and after it
    step_s: float  # measured, from the end of the first step to the end of the last
    lag_mean: float
    lag_max: int

    @property
    def ratio(self) -> float:
        return self.mean("step_s") / self.step_s

    def mean(self, name: str) -> float:
        return sum(getattr(one, name) for one in self.predicted) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    print("| run | predicted s/step | measured | ratio | mean lag predicted | measured | largest | measured |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for _ in range(options.repeats):
        for one in outcomes(options.steps):
            print(
                f"| {one.name} | {one.mean('step_s'):.3f} | {one.step_s:.3f} | {one.ratio:.2f} | "
                f"{one.mean('lag_mean'):.2f} | {one.lag_mean:.2f} | {one.mean('lag_max'):g} | {one.lag_max} |",
                flush=True,
            )


def outcomes(steps: int) -> Iterator[Outcome]:
    """Record a run, then each of the others and, after it, one more that is recorded."""
    shape = count_model("bundled:tiny_moe")
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder) / "warm_up", WARM_UP_STEPS, RECORDED)
        before = measured_speed(run(Path(folder) / "recorded", steps, RECORDED))
        for index, (name, overrides) in enumerate(PREDICTED.items()):
            rows = read_steps(run(Path(folder) / str(index), steps, overrides))
            after = measured_speed(run(Path(folder) / f"recorded{index}", steps, RECORDED))
            config = load_config(RECIPE, [*FIXED, f"trainer.steps={steps}", *overrides])
            predicted = (simulate(config, shape, before, steps=steps), simulate(config, shape, after, steps=steps))
            before = after
            seconds = [row["seconds"]["step"] for row in rows[1:]]
            tokens = [row["metrics"]["sampled_tokens"] for row in rows]
            lags = [row["metrics"]["staleness/lag"] for row in rows]
            yield Outcome(
                name,
                predicted,
                sum(seconds) / len(seconds),
                sum(lag * count for lag, count in zip(lags, tokens, strict=True)) / sum(tokens),
                round(max(row["metrics"]["staleness/lag_max"] for row in rows)),
            )


def run(folder: Path, steps: int, overrides: list[str]) -> Path:
    command = [sys.executable, "-c", "from steadyrl.cli import main; main()", "train", str(RECIPE), *FIXED]
    words = [*command, f"run_dir={folder}", f"trainer.steps={steps}", *overrides]
    # torch with several threads beside another process is slower by an order of magnitude
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def read_steps(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
