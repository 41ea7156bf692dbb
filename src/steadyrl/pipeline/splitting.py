"""One request over several engines, and their answers as one: pure functions.

A request is split by prompts. The random numbers of a prompt belong to its place in the stream of prompts
(`GenerationRequest.first`), so they are the same whichever engine draws them; only the rounding of a matrix product may
depend on how many prompts an engine has. The inline backend splits as well, and so gives the same bits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from steadyrl.types import GenerationRequest, Rollout


def split(request: GenerationRequest, engines: int) -> list[GenerationRequest]:
    """Consecutive shares of the prompts, for the first engine, the second, ...; sizes differ by one at most.

    With fewer prompts than engines there are fewer shares: none is empty.
    """
    total = len(request.prompts)
    cuts = [total * index // engines for index in range(engines + 1)]
    return [
        dataclasses.replace(request, prompts=request.prompts[start:stop], first=request.first + start)
        for start, stop in itertools.pairwise(cuts)
        if stop > start
    ]


def join(shares: Sequence[GenerationRequest], answers: Sequence[list[Rollout]]) -> list[Rollout]:
    """The answers to the shares of a request, in the order of the request; groups are counted through."""
    joined: list[Rollout] = []
    start = 0
    for share, rollouts in zip(shares, answers, strict=True):
        for rollout in rollouts:
            rollout.group += start
        joined += rollouts
        start += len(share.prompts)
    return joined
