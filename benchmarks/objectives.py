"""What do the objectives cost, in time and memory, and what does the exact quantile cost?

    python benchmarks/objectives.py [--tokens 4194304] [--size 134217728] [--repeats 5] [presets ...]

First table: one forward and backward pass of `policy_loss` on one micro-batch of `--tokens` tokens in responses of
1024, a tenth of them masked. Runs alternate between the objectives, so that a machine whose speed drifts slows all;
medians are shown, and the ratio to the first one. Memory is the growth of the process's largest resident set
(`ru_maxrss`) over what it was when the inputs stood ready, in a fresh process for each objective. Second table: the
order statistic against `torch.sort` and `torch.kthvalue` on `--size` float32 values; all must give the same number.
One thread throughout.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import policy_loss
from steadyrl.objective.quantile import order_statistic
from steadyrl.objective.rule import Layout
from steadyrl.types import BatchCounts

DEFAULT = ("grpo", "sat-grpo", "gspo", "sat-gspo", "dppo-tv", "m2po", "cispo")
WANTED = 1.3  # sat-grpo against grpo, at most
LENGTH = 1024  # tokens of a response
ALPHA = 0.9


class Pass:
    """A forward and backward pass of the loss on one random micro-batch."""

    def __init__(self, tokens: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.behavior = -torch.rand(tokens, generator=random) * 2
        drift = 0.03 * torch.randn(tokens, generator=random) * (1 + 9 * (torch.rand(tokens, generator=random) < 0.1))
        self.logp = (self.behavior + drift).clamp(max=0.0).requires_grad_()
        sequence = torch.arange(tokens) // LENGTH
        responses = int(sequence[-1]) + 1
        self.layout = Layout(torch.rand(tokens, generator=random) < 0.9, sequence, responses)
        self.advantage = torch.randn(responses, generator=random)[sequence]
        self.counts = BatchCounts(int(self.layout.loss_mask.sum()), responses)

    def run(self, objective: ObjectiveConfig) -> float:
        """Seconds."""
        self.logp.grad = None
        start = time.perf_counter()
        policy_loss(
            objective,
            logp=self.logp,
            behavior_logp=self.behavior,
            advantage=self.advantage,
            layout=self.layout,
            counts=self.counts,
        ).loss.backward()
        return time.perf_counter() - start


def objective_of(preset: str) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate({"preset": preset, "kl_coef": 0.0})


def peak_growth(preset: str, tokens: int) -> int:
    """KiB that one pass adds to the largest resident set of this process."""
    objective_pass = Pass(tokens)
    Pass(4 * LENGTH).run(objective_of(preset))  # what torch allocates once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # the inputs were made with temporaries; their peak must not hide that of the pass
    filler = torch.zeros(max(0, before - resident()) * 256)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    objective_pass.run(objective_of(preset))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert filler.numel() >= 0
    return after - before


def resident() -> int:
    """KiB of this process that are in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * (resource.getpagesize() // 1024)


def loss_table(presets: list[str], tokens: int, repeats: int) -> None:
    objective_pass = Pass(tokens)
    seconds: dict[str, list[float]] = {preset: [] for preset in presets}
    for preset in presets:
        objective_pass.run(objective_of(preset))  # the first pass pays for memory that the others find
    for _ in range(repeats):
        for preset in presets:
            seconds[preset].append(objective_pass.run(objective_of(preset)))
    first = statistics.median(seconds[presets[0]])
    print(f"forward and backward, {tokens:,} tokens, one thread, median of {repeats}\n")
    print(f"| objective | seconds | against {presets[0]} | peak memory above the inputs, MiB | bytes per token |")
    print("| --- | --- | --- | --- | --- |")
    for preset in presets:
        median, kib = statistics.median(seconds[preset]), measured_apart(preset, tokens)
        print(f"| `{preset}` | {median:.3f} | {median / first:.2f} | {kib / 1024:.0f} | {kib * 1024 / tokens:.0f} |")
    if {"grpo", "sat-grpo"} <= set(presets):
        pairs = [sat / plain for sat, plain in zip(seconds["sat-grpo"], seconds["grpo"], strict=True)]
        print(f"\nsat-grpo against grpo, pair by pair: median {statistics.median(pairs):.2f}, wanted at most {WANTED}")


def measured_apart(preset: str, tokens: int) -> int:
    """`peak_growth` in a process of its own."""
    command = [sys.executable, __file__, "--peak", preset, "--tokens", str(tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def quantile_table(size: int, repeats: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).abs_()
    mask = torch.ones(size, dtype=torch.bool)
    k = -(-9 * size // 10)
    ways: dict[str, Callable[[], Tensor]] = {
        "order_statistic": lambda: order_statistic(values, mask, ALPHA),
        "torch.kthvalue": lambda: values.kthvalue(k).values,
        "torch.sort": lambda: values.sort().values[k - 1],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, float] = {}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            answers[name] = float(way())
            seconds[name].append(time.perf_counter() - start)
    print(f"\nquantile {ALPHA} of {size:,} float32 values, one thread, median of {repeats}\n")
    print("| way | seconds | against order_statistic | answer |")
    print("| --- | --- | --- | --- |")
    ours = statistics.median(seconds["order_statistic"])
    for name in ways:
        median = statistics.median(seconds[name])
        print(f"| `{name}` | {median:.3f} | {median / ours:.2f} | {answers[name]:.9g} |")
    assert len(set(answers.values())) == 1, "the three do not agree"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="*", default=list(DEFAULT))
    parser.add_argument("--tokens", type=int, default=1 << 22)
    parser.add_argument("--size", type=int, default=1 << 27, help="values of the quantile; 0 leaves it out")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quantile-repeats", type=int, default=3)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print(peak_growth(options.peak, options.tokens))
        return
    loss_table(options.presets, options.tokens, options.repeats)
    if options.size:
        quantile_table(options.size, options.quantile_repeats)


if __name__ == "__main__":
    main()
