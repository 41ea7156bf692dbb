"""The trainer's side of the engine: which weights it holds, what is asked of it, and how long that takes."""

from __future__ import annotations

import time

from torch import Tensor

from steadyrl.pipeline.accounts import Clock
from steadyrl.pipeline.backend import Backend, Generated
from steadyrl.trainer.base import Learner


class EngineLink:
    """A backend, with the weights that it may still be asked for and a clock on every wait."""

    def __init__(self, learner: Learner, backend: Backend, clock: Clock) -> None:
        self.backend = backend
        self.clock = clock
        self.snapshots: dict[int, dict[str, Tensor]] = {}  # versions that batches still come from
        self.version = -1  # of the weights that the engine holds once it has done what it was asked
        self._learner = learner

    def keep_snapshot(self, needed: set[int]) -> None:
        """Copy the present weights if they are among the versions that are needed, and forget the others."""
        version = self._learner.version
        self.snapshots = {old: weights for old, weights in self.snapshots.items() if old in needed}
        if version in needed and version not in self.snapshots:
            self.snapshots[version] = {name: w.clone() for name, w in self._learner.named_weights().items()}

    def broadcast(self, version: int) -> None:
        """Make the engine hold a version, if it does not already."""
        if version == self.version:
            return
        start = time.monotonic()
        present = version == self._learner.version
        self.backend.broadcast(self._learner.named_weights() if present else self.snapshots[version], version)
        self.version = version
        self.clock.measure("broadcast", start, self._learner.version)

    def collect(self, phase: str) -> Generated:
        """Wait for the oldest request, which the timeline calls `phase`."""
        start = time.monotonic()
        generated = self.backend.collect()
        self.note_wait(start)
        self.clock.engine(phase, generated.start_s, generated.end_s, self._learner.version)
        return generated

    def note_wait(self, start_s: float) -> None:
        """The trainer waited from `start_s` until now; what the engine loaded meanwhile comes into the timeline."""
        self.clock.measure("wait", start_s, self._learner.version)
        for loaded in self.backend.loads():
            self.clock.engine("load", loaded.start_s, loaded.end_s, loaded.version)
