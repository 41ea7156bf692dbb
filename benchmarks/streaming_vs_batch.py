"""Streaming against batch-wise asynchronous training where response lengths vary tenfold: seconds per trained token.

    python benchmarks/streaming_vs_batch.py [--steps 60] [--repeats 3] [--prompts 4]

The bundled model on sums of 2 to 20 terms at temperature 3: nine of ten responses have 5 to 44 tokens. Both regimes
train on the same number of prompts with a lag of at most 2, the engine in a process of its own with a place for every
response of a round, which is two batches. A round that is generated whole waits for its longest response with ever
fewer sequences to decode; streaming gives every place that becomes free to the next response. With 4 prompts (32
responses) in a batch the engine is the slower of the two; with 16 (128) the trainer is, and nothing can be gained.
Runs alternate, so that a machine whose speed drifts slows both.
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
LAG, RESPONSES = 2, 8
WORKLOAD = [
    f"pipeline.responses_per_prompt={RESPONSES}",
    "task.min_terms=2",
    "task.terms=20",
    "sampling.max_response_tokens=64",
    "trainer.lr=1e-7",  # the lengths stay what they are
    "sampling.temperature=3.0",
    "evaluation.every_steps=0",
    "evaluation.prompts=4",
    "evaluation.samples_per_prompt=1",
    "pipeline.backend=process",
]
REGIMES = {
    "batch": ["pipeline.regime=batch", f"pipeline.lag={LAG}"],
    "streaming": ["pipeline.regime=streaming", "pipeline.lag=1", f"pipeline.max_lag={LAG}"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="in a batch, with 8 responses each")
    options = parser.parse_args()
    places = LAG * options.prompts * RESPONSES
    sizes = [f"pipeline.prompts_per_batch={options.prompts}", f"engine.max_sequences={places}"]
    rates: dict[str, list[float]] = {regime: [] for regime in REGIMES}
    for _ in range(options.repeats):
        for regime, overrides in REGIMES.items():
            measured = run(options.steps, [*sizes, *overrides])
            rates[regime].append(measured["tokens_per_s"])
            print(f"{regime:>9}: " + ", ".join(f"{name} {value:.3g}" for name, value in measured.items()), flush=True)
    ratios = [stream / batch for stream, batch in zip(rates["streaming"], rates["batch"], strict=True)]
    pairs = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"streaming over batch-wise, trained tokens per second, pair by pair: {pairs}")
    print(f"median {statistics.median(ratios):.2f}")


def run(steps: int, overrides: list[str]) -> dict[str, float]:
    """Trained tokens per second of one run without its first steps, the lengths, and the waiting."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run_dir={folder}/run", f"trainer.steps={steps}", "record.rollouts_every_batches=10"]
        command = [sys.executable, "-c", "from steadyrl.cli import main; main()", "train", str(RECIPE)]
        subprocess.run([*command, *WORKLOAD, *fixed, *overrides], check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        rollouts = [
            json.loads(line)
            for file in (Path(folder) / "run" / "rollouts").iterdir()
            for line in file.read_text().splitlines()
        ]
    rows = [json.loads(line) for line in lines][4:]  # the first ones share the engine with the evaluation
    seconds = sum(row["seconds"]["step"] for row in rows)
    lengths = sorted(sum(rollout["loss_mask"]) for rollout in rollouts)
    return {
        "tokens_per_s": sum(row["metrics"]["sampled_tokens"] for row in rows) / seconds,
        "step_s": seconds / len(rows),
        "wait_share": sum(row["seconds"].get("wait", 0.0) for row in rows) / seconds,
        "lag_max": max(row["metrics"]["staleness/lag_max"] for row in rows),
        "length_5th": lengths[len(lengths) // 20],
        "length_95th": lengths[-1 - len(lengths) // 20],
    }


if __name__ == "__main__":
    main()
