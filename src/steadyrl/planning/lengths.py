"""How long prompts and responses are: recorded ones drawn again, or a distribution that somebody states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from steadyrl.axes import AboveZero, Table, ZeroOrMore

SAMPLE = 4096  # groups that a mean is taken over


@dataclass(frozen=True)
class GroupLengths:
    """One prompt and its responses, in tokens."""

    prompt: int
    responses: NDArray[np.int64]  # [G]


class Lengths(Protocol):
    """A source of groups."""

    def draw(self, rng: np.random.Generator, responses: int, limit: int) -> GroupLengths:
        """A prompt with so many responses, none longer than `limit` tokens."""
        ...


class StatedLengths(Table):
    """Independent responses, all prompts alike: the table `[lengths]` of a file of rates."""

    shape: Literal["lognormal", "geometric", "fixed"] = "lognormal"
    mean: Annotated[float, Field(ge=1, le=1e9)] = 8192  # tokens of a response, before the limit cuts
    spread: ZeroOrMore = 1.0  # of lognormal: standard deviation over mean
    prompt: AboveZero = 200  # tokens

    def draw(self, rng: np.random.Generator, responses: int, limit: int) -> GroupLengths:
        if self.shape == "geometric":
            lengths = rng.geometric(1 / self.mean, responses).astype(np.float64)
        elif self.shape == "lognormal":
            variance = np.log1p(self.spread**2)  # of the logarithm
            lengths = rng.lognormal(np.log(self.mean) - variance / 2, np.sqrt(variance), responses)
        else:
            lengths = np.full(responses, self.mean)
        return GroupLengths(round(self.prompt), np.clip(np.rint(lengths), 1, limit).astype(np.int64))


@dataclass(frozen=True)
class RecordedLengths:
    """Groups of a run, drawn again with replacement: responses to one prompt stay together."""

    groups: tuple[GroupLengths, ...]

    def draw(self, rng: np.random.Generator, responses: int, limit: int) -> GroupLengths:
        group = self.groups[rng.integers(len(self.groups))]
        lengths = group.responses
        if len(lengths) != responses:
            lengths = rng.choice(lengths, responses)
        return GroupLengths(group.prompt, np.minimum(lengths, limit))


@dataclass(frozen=True)
class MeanLengths:
    """Means of a length distribution, in tokens."""

    prompt: float
    response: float
    # of the tokens before a sampled one, prompt included, over all sampled tokens: long responses count more
    context: float

    @property
    def sequence(self) -> float:
        return self.prompt + self.response


def mean_lengths(lengths: Lengths, responses: int, limit: int) -> MeanLengths:
    """Monte Carlo over `SAMPLE` groups; always the same ones."""
    rng = np.random.default_rng(0)
    groups = [lengths.draw(rng, responses, limit) for _ in range(SAMPLE)]
    prompts = np.array([group.prompt for group in groups], np.float64)
    sampled = np.stack([group.responses for group in groups]).astype(np.float64)  # [groups, G]
    contexts = prompts[:, None] + (sampled - 1) / 2
    context = float((sampled * contexts).sum() / sampled.sum())
    return MeanLengths(float(prompts.mean()), float(sampled.mean()), context)
