"""The learner as Ray actors: one for each trainer rank, driven as if it were one learner.

The driver shares the micro-batches of an optimizer step out, calls every rank, and puts their answers together again.
A rank that dies takes the group with it: the others may wait for it in the middle of a step. That is a
`LearnerLostError`, after which `run.train` goes on from the newest checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadyrl.config import RunConfig
from steadyrl.errors import LearnerLostError, SteadyRLError, TrainingError
from steadyrl.pipeline.packing import share
from steadyrl.pipeline.ray_cluster import RayCluster, absolute, cause, load_ray, lost
from steadyrl.pipeline.ray_rank import RankActor
from steadyrl.pipeline.ray_transport import num_bytes, pack_batch, pack_weights, unpack_weights
from steadyrl.trainer.base import StepResult
from steadyrl.types import TrainBatch

POLL_S = 1.0
GRACE_S = 10.0  # for the other ranks to answer, once one has failed


class RayLearner:
    """A `Learner` over the trainer ranks of a cluster. What they save is to be seen by all of them, and by the driver.

    Raises:
        ConfigError: the model cannot be loaded.
        TrainingError: a rank did not start.
    """

    def __init__(self, config: RunConfig, cluster: RayCluster) -> None:
        self.version = 0
        self._ray = load_ray()
        self._weights: dict[str, Tensor] | None = None  # of this version, once somebody has asked
        self._old: tuple[Mapping[str, Tensor], Any] | None = None  # old weights, and where they are in the store
        self._broken: SteadyRLError | None = None  # why the ranks cannot be called any more
        model = config.model.model_copy(update={"path": absolute(config.model.path)})
        config = config.model_copy(update={"model": model})
        actor = self._ray.remote(RankActor)
        self._ranks = [
            actor.options(**place.options(), max_restarts=0).remote(config, index)
            for index, place in enumerate(cluster.ranks)
        ]
        try:
            timeout_s = config.engine.start_timeout_s
            rendezvous = f"file://{cluster.folder}/ranks"
            if not cluster.folder:
                (rendezvous,) = self._results([self._ranks[0].rendezvous.remote()], timeout_s)
            self._all("start", rendezvous, timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise

    def train_step(self, micro_batches: Sequence[TrainBatch], old_weights: Mapping[str, Tensor] | None) -> StepResult:
        """One optimizer step; see `trainer.base.Learner`.

        Raises:
            LearnerLostError: a rank died.
        """
        self._weights = None
        count = len(self._ranks)
        shares = [[pack_batch(batch) for batch in share(micro_batches, rank, count)] for rank in range(count)]
        old = self._in_store(old_weights)
        calls = [rank.train_step.remote(part, old) for rank, part in zip(self._ranks, shares, strict=True)]
        results = self._results(calls)
        self.version += 1
        tokens = sum(int(batch.loss_mask.sum()) for batch in micro_batches)
        return StepResult(
            metrics={**results[0].metrics, "transport/batch_bytes_per_token": num_bytes(shares) / tokens},
            histograms=results[0].histograms,
            logp=[logp for result in results for logp in result.logp],
            old_logp=[logp for result in results for logp in result.old_logp],
        )

    def named_weights(self) -> dict[str, Tensor]:
        """Whole, in float32, from the object store: for reading only, and until the next step."""
        if self._weights is None:
            self._weights = unpack_weights(self._all("named_weights")[0])
        return self._weights

    def save(self, folder: Path) -> None:
        self._all("save", str(folder.resolve()))

    def load(self, folder: Path, version: int) -> None:
        self._weights = None
        self._all("load", str(folder.resolve()), version)
        self.version = version

    def close(self) -> None:
        for rank in self._ranks:
            self._ray.kill(rank)

    def _in_store(self, weights: Mapping[str, Tensor] | None) -> Any:
        """The old weights are the same object for many steps: they are put into the store once."""
        if weights is None:
            return None
        if self._old is None or self._old[0] is not weights:
            self._old = weights, self._ray.put(pack_weights(weights, torch.float32))
        return self._old[1]

    def _all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of every rank, with the same arguments, and wait for all answers."""
        return self._results([getattr(rank, method).remote(*arguments) for rank in self._ranks], timeout_s)

    def _results(self, calls: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """What the ranks answer, by rank.

        Raises:
            LearnerLostError: a rank died.
            SteadyRLError: what the ranks raised, the same on each.
            TrainingError: a rank failed in another way, or none answered in time.
        """
        if self._broken is not None:
            raise self._broken
        ray, waiting = self._ray, list(calls)
        errors: list[Exception] = []
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            done, waiting = ray.wait(waiting, timeout=min(POLL_S, deadline - time.monotonic()))
            for call in done:
                try:
                    ray.get(call)
                except ray.exceptions.RayError as error:
                    errors.append(error)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not errors and not waiting:
            return [ray.get(call) for call in calls]
        causes = [getattr(error, "cause", error) for error in errors]
        if len(errors) == len(calls) and all(isinstance(one, SteadyRLError) for one in causes):
            raise causes[0]  # the ranks agree, and can go on
        self._broken = self._why(errors, len(waiting), timeout_s)
        raise self._broken

    def _why(self, errors: Sequence[Exception], silent: int, timeout_s: float | None) -> SteadyRLError:
        dead = [error for error in errors if isinstance(error, lost(self._ray))]
        if dead:
            return LearnerLostError(f"a trainer rank died: {cause(dead[0])}")
        if errors:
            return TrainingError(f"a trainer rank failed:\n{errors[0]}")
        return TrainingError(
            f"gave up waiting for {silent} of {len(self._ranks)} trainer ranks to start after {timeout_s:.0f} s: raise "
            "engine.start_timeout_s if the cluster is slow, else look at its free resources with ray status"
        )
