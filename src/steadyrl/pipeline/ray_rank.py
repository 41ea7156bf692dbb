"""A trainer rank as a Ray actor: one process of the group that trains the model."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from steadyrl.config import RunConfig
from steadyrl.pipeline.ray_transport import PackedWeights, pack_weights, unpack_batch, unpack_weights
from steadyrl.trainer.base import StepResult
from steadyrl.trainer.build import build_learner


class RankActor:
    """Every method but `rendezvous` is called on all ranks, in the same order; see `FsdpLearner`."""

    def __init__(self, config: RunConfig, index: int) -> None:
        torch.set_num_threads(config.trainer.threads)
        self._config = config
        self._index = index

    def rendezvous(self) -> str:
        """A free port of this rank's machine, where the ranks can find each other."""
        from ray.util import get_node_ip_address  # pyright: ignore[reportMissingImports]

        host = get_node_ip_address()
        with socket.create_server((host, 0)) as server:
            return f"tcp://{host}:{server.getsockname()[1]}"

    def start(self, rendezvous: str) -> None:
        if rendezvous.startswith("file:"):  # all on this machine: they need not be heard outside
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        self._learner = build_learner(self._config, self._index, rendezvous)

    def train_step(self, micro_batches: list[Mapping[str, Any]], old_weights: PackedWeights | None) -> StepResult:
        batches = [unpack_batch(packed) for packed in micro_batches]
        return self._learner.train_step(batches, None if old_weights is None else unpack_weights(old_weights))

    def named_weights(self) -> PackedWeights:
        """In float32; of rank 0 alone."""
        return pack_weights(self._learner.named_weights(), torch.float32)

    def save(self, folder: str) -> None:
        self._learner.save(Path(folder))

    def load(self, folder: str, version: int) -> None:
        self._learner.load(Path(folder), version)
