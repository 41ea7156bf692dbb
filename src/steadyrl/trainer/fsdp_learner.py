"""The learner on several ranks, each in a process of its own: FSDP2 around the model, the same code for the rest."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh

from steadyrl.config import RunConfig
from steadyrl.models.load import load_policy, load_tokenizer
from steadyrl.trainer.learner import LocalLearner
from steadyrl.trainer.ranks import Ranks
from steadyrl.trainer.sharding import shard, training_device


class FsdpLearner(LocalLearner):
    """One rank of a `Learner`.

    Every method is called on all the ranks, in the same order, and all of them work on it together:

    * `train_step(micro_batches, old_weights)`: the micro-batches are this rank's share, which `pipeline.packing.pack`
      makes: as many on every rank, blank ones where there is no work. `old_weights` are whole tensors, the same on
      every rank (on the CPU: a rank takes its slices of them, a parameter at a time). The metrics and histograms that
      come back are those of all ranks, the same on each; `logp` and `old_logp` are of this rank's micro-batches, on
      the CPU. Errors that have to do with the data are raised on every rank, in the same words.
    * `named_weights()`: whole tensors on the CPU on rank 0, {} on the others. Made a parameter at a time.
    * `save(folder)`, `load(folder, version)`: a folder that all ranks see. What one number of ranks saved, any other
      number loads, a `LocalLearner` too.
    * `version`: optimizer steps completed, the same on every rank.

    A rank that dies, or raises an error of its own (no memory), leaves the others waiting: whoever started the ranks
    has to end them all, and start them again from a checkpoint.

    Args:
        ranks: from `trainer.ranks.join`; its process group carries the slices too.

    Raises:
        ConfigError: as `load_policy`, or there is no such device.
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        mesh = init_device_mesh(training_device(config.trainer.device).type, (ranks.count,))
        spread = partial(shard, mesh=mesh, dtype=getattr(torch, config.model.dtype))
        super().__init__(load_policy(config.model), load_tokenizer(config.model.path), config, ranks, spread)
