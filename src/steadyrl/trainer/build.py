"""From a configuration to a learner that loads its own model."""

from __future__ import annotations

from steadyrl.config import RunConfig
from steadyrl.models.load import load_policy, load_tokenizer
from steadyrl.trainer.fsdp_learner import FsdpLearner
from steadyrl.trainer.learner import LocalLearner
from steadyrl.trainer.ranks import join


def build_learner(config: RunConfig, index: int, rendezvous: str) -> LocalLearner:
    """Rank `index` of `trainer.ranks`, which find each other at `rendezvous`; see `trainer.ranks.join`."""
    if config.trainer.kind == "fsdp":
        return FsdpLearner(config, join(index, config.trainer.ranks, rendezvous))
    return LocalLearner(load_policy(config.model), load_tokenizer(config.model.path), config)
