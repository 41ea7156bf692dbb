"""What do log-probabilities cost without tokens x vocabulary in memory?

    python benchmarks/logprobs.py [--vocabulary 151936] [--hidden 1024] [--pairs 5] [--out FILE]

The last step of a language model, float32, with log-probabilities and entropy forward, and backward the gradients of
the states and of the output matrix: the plain way makes all logits and keeps them (`token_logp`, and the entropy from
the same logits), the other makes them in blocks of the vocabulary, twice (`chosen_logp`). Memory is the growth of the
resident set, the gradients included, over what it was when the inputs stood ready, in a fresh process for each line.
The plain way is measured at a few sizes; at `--tokens` it needs more than many machines have, and its figure there is
the line through the two largest of them.

Time is that of the process (user and system), so that neighbours on a shared machine count less; the two ways take
turns on the same inputs, and the median of the ratios is shown. Both must agree to 1e-5. One thread. Linux.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from steadyrl.models.logprobs import Projection, chosen_logp, token_logp

TEMPERATURE = 0.7
LARGEST_SHARE = 0.1  # of the plain way's memory
LARGEST_RATIO = 1.2  # of its time


class Inputs:
    """States, output matrix, targets, and a coefficient for each log-probability, as a policy loss has one."""

    def __init__(self, tokens: int, vocabulary: int, hidden: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.states = torch.randn(tokens, hidden, generator=random).requires_grad_()
        self.weight = torch.randn(vocabulary, hidden, generator=random).mul_(hidden**-0.5).requires_grad_()
        self.targets = torch.randint(vocabulary, (tokens,), generator=random)
        self.coefficients = torch.randn(tokens, generator=random)

    def run(self, way: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probabilities, entropy and the two gradients."""
        self.states.grad = self.weight.grad = None
        projection = Projection(self.weight)
        if way == "plain":
            logits = projection.logits(self.states)
            logp, entropy = token_logp(logits, self.targets, TEMPERATURE), plain_entropy(logits)
        else:
            logp, entropy = chosen_logp(projection, self.states, self.targets, TEMPERATURE)
        (logp * self.coefficients).sum().backward()
        assert self.states.grad is not None
        assert self.weight.grad is not None
        return logp.detach(), entropy.detach(), self.states.grad, self.weight.grad


@torch.no_grad()
def plain_entropy(logits: Tensor) -> Tensor:
    """[T] nats, as a metric: log sum e^z - sum p z."""
    scaled = logits / TEMPERATURE
    return torch.logsumexp(scaled, dim=-1) - (torch.softmax(scaled, dim=-1) * scaled).sum(dim=-1)


def resident(name: str) -> int:
    """A size of /proc/self/status in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def peak(way: str, tokens: int, vocabulary: int, hidden: int) -> int:
    """Bytes that a pass adds to the resident set of this process."""
    Inputs(8, vocabulary=100, hidden=hidden).run(way)  # what torch allocates once
    inputs = Inputs(tokens, vocabulary, hidden)
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark so far is forgotten
    before = resident("VmRSS")
    inputs.run(way)
    return resident("VmHWM") - before


def peak_apart(way: str, tokens: int, vocabulary: int, hidden: int) -> int:
    """`peak` in a process of its own."""
    sizes = ["--tokens", str(tokens), "--vocabulary", str(vocabulary), "--hidden", str(hidden)]
    command = [sys.executable, __file__, "--peak", way, *sizes]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def memory_table(tokens: int, plain_tokens: list[int], vocabulary: int, hidden: int) -> Iterator[str]:
    yield "| way | tokens | peak above the inputs, GiB |"
    yield "| --- | --- | --- |"
    plain = []
    for count in sorted(plain_tokens):
        plain.append((count, peak_apart("plain", count, vocabulary, hidden)))
        yield f"| plain | {count:,} | {plain[-1][1] / 2**30:.2f} |"
    (few, low), (many, high) = plain[-2:]
    at_tokens = high + (high - low) / (many - few) * (tokens - many)
    yield f"| plain, extrapolated | {tokens:,} | {at_tokens / 2**30:.2f} |"
    chunked = peak_apart("chunked", tokens, vocabulary, hidden)
    yield f"| in chunks | {tokens:,} | {chunked / 2**30:.2f} |"
    gradients = 4 * hidden * (vocabulary + tokens) / 2**30
    yield ""
    yield (
        f"In chunks: {chunked / at_tokens:.3f} of the plain way's peak, wanted at most {LARGEST_SHARE}. "
        f"The two gradients alone take {gradients:.2f} GiB of either."
    )


def time_table(tokens: int, vocabulary: int, hidden: int, pairs: int) -> Iterator[str]:
    inputs = Inputs(tokens, vocabulary, hidden)
    seconds: dict[str, list[float]] = {"plain": [], "chunked": []}
    for _ in range(pairs):
        results = []
        for way, measured in seconds.items():
            start = time.process_time()
            results.append(inputs.run(way))
            measured.append(time.process_time() - start)
        for found, wanted in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    ratio = statistics.median(ours / plain for ours, plain in zip(seconds["chunked"], seconds["plain"], strict=True))
    yield "| way | tokens | CPU seconds, forward and backward |"
    yield "| --- | --- | --- |"
    for way, measured in seconds.items():
        yield f"| {way} | {tokens:,} | {statistics.median(measured):.1f} |"
    yield ""
    yield f"In chunks against plain, pair by pair: median {ratio:.2f} of {pairs}, wanted at most {LARGEST_RATIO}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the memory that is asked about")
    parser.add_argument("--plain-tokens", type=int, nargs="+", default=[512, 1024, 2048], help="measured the plain way")
    parser.add_argument("--timed-tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for the tables")
    parser.add_argument("--peak", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print(peak(options.peak, options.tokens, options.vocabulary, options.hidden))
        return
    lines = []
    for line in chain(
        (
            f"Log-probabilities of chosen tokens, vocabulary {options.vocabulary:,}, hidden size {options.hidden:,}, "
            "float32, one CPU thread (`python benchmarks/logprobs.py`).",
            "",
        ),
        memory_table(options.tokens, options.plain_tokens, options.vocabulary, options.hidden),
        ("",),
        time_table(options.timed_tokens, options.vocabulary, options.hidden, options.pairs),
    ):
        print(line, flush=True)
        lines.append(line)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
