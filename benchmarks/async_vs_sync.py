"""How much faster is asynchronous training than synchronous training of the same number of steps?

    python benchmarks/async_vs_sync.py [--steps 40] [--repeats 3] [recipe]

Both run the engine in a process of its own; only `pipeline.regime` differs, so the work is the same and
the overlap is not. The limit printed beside the ratio is what perfect overlap would give: the longer of
generation and training in place of their sum, from the seconds that the synchronous run itself logged.
Runs alternate (sync, async, sync, ...), so that a machine whose speed drifts slows both. Evaluations and
start-up are left out: time is counted over the optimizer steps, from the end of the first to the end of
the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.toml"
REGIMES = {
    "sync": ["pipeline.regime=sync", "pipeline.lag=0"],
    "async": ["pipeline.regime=batch", "pipeline.lag=8"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default=RECIPE, type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    seconds: dict[str, list[dict[str, float]]] = {regime: [] for regime in REGIMES}
    for _ in range(options.repeats):
        for regime, overrides in REGIMES.items():
            measured = run(options.recipe, options.steps, overrides)
            seconds[regime].append(measured)
            print(f"{regime:>5}: " + ", ".join(f"{name} {value:.3f}" for name, value in measured.items()), flush=True)
    ratios = [sync["step"] / other["step"] for sync, other in zip(seconds["sync"], seconds["async"], strict=True)]
    limits = [(one["generate"] + one["train"]) / max(one["generate"], one["train"]) for one in seconds["sync"]]
    print(f"seconds per step, median: sync {median(seconds['sync'])}, async {median(seconds['async'])}")
    pairs = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"speed-up, pair by pair: {pairs}; median {statistics.median(ratios):.2f}")
    print(f"limit (generate + train) / max(generate, train): {statistics.median(limits):.2f}")


def run(recipe: Path, steps: int, overrides: list[str]) -> dict[str, float]:
    """Mean seconds per step and per phase of one run, its first step left out."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"run_dir={folder}/run",
            f"trainer.steps={steps}",
            "evaluation.every_steps=0",
            "pipeline.backend=process",
        ]
        command = [
            sys.executable,
            "-c",
            "from steadyrl.cli import main; main()",
            "train",
            str(recipe),
            *fixed,
            *overrides,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [
            json.loads(line)["seconds"] for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    later = rows[2:]  # the second step still shares the engine with the evaluation of the base model
    return {
        phase: statistics.fmean(row.get(phase, 0.0) for row in later) for phase in ("step", "generate", "train", "wait")
    }


def median(runs: list[dict[str, float]]) -> str:
    return f"{statistics.median(one['step'] for one in runs):.3f}"


if __name__ == "__main__":
    main()
