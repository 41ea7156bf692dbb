"""Would the tests notice? Breaks a copy of the objective in one place at a time and counts the tests that fail.

    python benchmarks/mutations.py [--only WORD]

Prints a table, mutation -> failing tests, and exits with 1 if a mutation survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OBJECTIVE = "steadyrl/objective"
ENOUGH = 10  # failing tests, after which the rest is not run


@dataclass(frozen=True)
class Mutation:
    """One textual change, and the test files that have to see it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = [
    Mutation(
        "flip a sign in the loss",
        "loss.py",
        "loss = -(weight * factor",
        "loss = (weight * factor",
        ("test_correction.py",),
    ),
    Mutation(
        "drop a detach",
        "ratio.py",
        "anchor = torch.where(loss_mask, anchor_logp.detach().to(dtype), 0.0)",
        "anchor = torch.where(loss_mask, anchor_logp.to(dtype), 0.0)",
        ("test_correction.py",),
    ),
    Mutation(
        "swap a min for a max",
        "boundary.py",
        "surrogate=torch.minimum(ratio * advantage",
        "surrogate=torch.maximum(ratio * advantage",
        ("test_correction.py",),
    ),
    Mutation(
        "move a mask after the exp",
        "penalty.py",
        """    log_ratio = -token_log_ratio(logp, reference_logp, loss_mask)
""",
        """    log_ratio = reference_logp.detach() - logp
    return torch.where(loss_mask, torch.expm1(log_ratio) - log_ratio, 0.0)
""",
        ("test_invariance.py",),
    ),
    Mutation(
        "use an interpolated quantile",
        "quantile.py",
        "    return order_statistic_across(values, loss_mask, alpha, lambda counts: counts, weights)\n",
        "    active = values.detach()[loss_mask]\n"
        "    return active.quantile(alpha) if active.numel() else values.new_zeros(())\n",
        ("test_quantile.py",),
    ),
    Mutation(
        "count the tokens of the rank",
        "aggregate.py",
        "max(counts.num_tokens, 1)",
        "max(int(layout.loss_mask.sum()), 1)",
        ("test_aggregate.py", "test_ranks.py"),
    ),
    Mutation(
        "count the responses of the rank",
        "aggregate.py",
        "max(counts.num_sequences, 1)",
        "max(layout.num_sequences, 1)",
        ("test_aggregate.py",),
    ),
    Mutation(
        "leave rejected tokens out of the denominator",
        "loss.py",
        "weight = aggregation_weight(objective, layout, counts).to(log_ratio.dtype)",
        "weight = aggregation_weight(objective, layout, counts).to(log_ratio.dtype)\n"
        "    if objective.reject: weight = weight * loss_mask.sum() / (factor != 0).sum().clamp(min=1)",
        ("test_rejection.py",),
    ),
    Mutation(
        "weigh with the inverse of the mismatch",
        "correction.py",
        "log_k = mismatch.detach().double()",
        "log_k = -mismatch.detach().double()",
        ("test_correction.py",),
    ),
    Mutation(
        "count the gate at its own quantile",
        "quantile.py",
        "digit = int((cumulative < rank).sum())",
        "digit = int((cumulative <= rank).sum())",
        ("test_quantile.py",),
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations with this word in their name")
    word = parser.parse_args().only
    survivors = 0
    print(f"{'mutation':<46} failing tests")
    for mutation in MUTATIONS:
        if word in mutation.name:
            failing = failing_tests(mutation)
            survivors += failing == 0
            count = "none: it SURVIVES" if failing == 0 else f"{failing}{' or more' if failing >= ENOUGH else ''}"
            print(f"{mutation.name:<46} {count}", flush=True)
    return 1 if survivors else 0


def failing_tests(mutation: Mutation) -> int:
    """Run the tests against a copy with the change in it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / OBJECTIVE / mutation.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.old) != 1:
            sys.exit(f"{mutation.name}: {mutation.file} has this text {text.count(mutation.old)} times, not once")
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        tests = [str(ROOT / "tests" / "objective" / name) for name in mutation.tests]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", f"--maxfail={ENOUGH}", *tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode not in (0, 1):  # not a matter of tests that pass or fail
        sys.exit(f"{mutation.name}: pytest could not run\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return sum(int(count) for count in re.findall(r"(\d+) (?:failed|error)", done.stdout.rsplit("\n", 3)[-2]))


if __name__ == "__main__":
    sys.exit(main())
