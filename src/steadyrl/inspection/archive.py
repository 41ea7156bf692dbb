"""The tokens of a dump on their way to the measurements: in a temporary file, in the order of their steps.

A rule such as SAT needs all tokens of an optimizer step before it can say anything about one of them, and a step
may be larger than the memory. So the active tokens are written down once, 20 bytes each, and read back step by step in
blocks of whole responses. Only a few numbers per response stay in memory.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.errors import SteadyRLError
from steadyrl.inspection.response import Response, StepKey
from steadyrl.objective.rule import Layout

TOKEN = np.dtype([(name, "<f4") for name in ("logp", "behavior_logp", "old_logp", "advantage")] + [("age", "<i4")])
UNKNOWN_AGE = -(2**31)  # a negative lag is a finding
BLOCK_TOKENS = 1 << 16  # the tensors of a rule and of the diagnostics take about a kilobyte per token
HAS_OLD, HAS_ADVANTAGE, HAS_AGE = 1, 2, 4


@dataclass(frozen=True)
class Block:
    """Some whole responses of one step: T active tokens of S responses."""

    layout: Layout  # every token is active
    logp: Tensor  # [T] float32
    behavior_logp: Tensor  # [T] float32
    old_logp: Tensor  # [T] float32, NaN where not recorded
    advantage: Tensor  # [T] float32, 0 where not recorded
    age: Tensor  # [T] int64, lag in optimizer steps; UNKNOWN_AGE where not recorded


@dataclass(frozen=True)
class Step:
    """The responses of one optimizer step."""

    key: StepKey
    responses: NDArray[np.int64]  # their places in the archive
    num_tokens: int
    has_old: bool  # on every response
    has_advantage: bool
    has_age: bool


class Archive:
    """Write with `add`, then read with `steps` and `blocks`. A context manager: the file lives as long as it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="steadyrl-inspect-")  # noqa: SIM115 closed by __exit__
        self._keys: dict[StepKey, int] = {}
        self._step, self._length, self._flags = array("i"), array("i"), array("b")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, response: Response) -> None:
        """Append the active tokens of a response that has `trainer_logp`."""
        assert response.trainer_logp is not None
        active = response.loss_mask
        tokens = np.empty(int(active.sum()), TOKEN)
        tokens["logp"] = response.trainer_logp[active]
        tokens["behavior_logp"] = response.behavior_logp[active]
        tokens["old_logp"] = np.nan if response.old_logp is None else response.old_logp[active]
        tokens["advantage"] = 0.0 if response.advantage is None else response.advantage[active]
        tokens["age"] = UNKNOWN_AGE
        flags = HAS_OLD * (response.old_logp is not None) | HAS_ADVANTAGE * (response.advantage is not None)
        if response.versions is not None and response.train_version is not None:
            versions = response.versions[active]
            tokens["age"] = np.where(versions >= 0, response.train_version - versions, UNKNOWN_AGE)
            flags |= HAS_AGE * bool((versions >= 0).all())
        try:
            self._file.write(tokens.tobytes())
        except OSError as error:
            raise SteadyRLError(
                f"the tokens do not fit into the folder for temporary files ({error}): make room there, or name a "
                "larger disk with TMPDIR=FOLDER"
            ) from error
        self._step.append(self._keys.setdefault(response.step, len(self._keys)))
        self._length.append(len(tokens))
        self._flags.append(flags)

    def steps(self) -> list[Step]:
        """All steps, in order."""
        step, length = np.asarray(self._step), np.asarray(self._length, np.int64)
        flags = np.asarray(self._flags)
        order = np.argsort(step, kind="stable")
        bounds = np.searchsorted(step[order], np.arange(len(self._keys) + 1))
        found = []
        for key, index in sorted(self._keys.items()):
            responses = order[bounds[index] : bounds[index + 1]]
            common = int(np.bitwise_and.reduce(flags[responses]))
            has = [bool(common & flag) for flag in (HAS_OLD, HAS_ADVANTAGE, HAS_AGE)]
            found.append(Step(key, responses, int(length[responses].sum()), *has))
        return found

    def blocks(self, step: Step) -> Iterator[Block]:
        """The step's responses, cut after about `BLOCK_TOKENS` tokens."""
        length = np.asarray(self._length, np.int64)
        offset = np.concatenate([[0], length.cumsum()[:-1]])
        taken: list[int] = []
        size = 0
        for response in step.responses:
            taken.append(int(response))
            size += int(length[response])
            if size >= BLOCK_TOKENS:
                yield self._block(taken, offset, length)
                taken, size = [], 0
        if taken:
            yield self._block(taken, offset, length)

    def _block(self, responses: list[int], offset: NDArray[np.int64], length: NDArray[np.int64]) -> Block:
        parts = []
        for run in np.split(responses, np.flatnonzero(np.diff(responses) != 1) + 1):  # neighbours in the file
            self._file.seek(int(offset[run[0]]) * TOKEN.itemsize)
            parts.append(self._file.read(int(length[run].sum()) * TOKEN.itemsize))
        tokens = np.frombuffer(b"".join(parts), TOKEN)
        sequence = torch.from_numpy(np.repeat(np.arange(len(responses)), length[responses]))
        mask = torch.ones(len(tokens), dtype=torch.bool)

        def field(name: str) -> Tensor:
            return torch.from_numpy(tokens[name].copy())

        return Block(
            layout=Layout(mask, sequence, len(responses)),
            logp=field("logp"),
            behavior_logp=field("behavior_logp"),
            old_logp=field("old_logp"),
            advantage=field("advantage"),
            age=field("age").long(),
        )
