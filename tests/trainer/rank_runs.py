"""One optimizer step on several processes, to compare with one. Imported by spawned processes."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from steadyrl.config import RunConfig
from steadyrl.engines.build import build_local_engine
from steadyrl.models.checkpointing import checkpoint_layers
from steadyrl.models.load import load_model, load_tokenizer
from steadyrl.pipeline.packing import advantages, pack, share
from steadyrl.recipe import build_config
from steadyrl.tasks.arithmetic import Arithmetic
from steadyrl.trainer.learner import LocalLearner
from steadyrl.trainer.ranks import TorchRanks, join, leave
from steadyrl.trainer.sharding import shard, whole
from steadyrl.types import GenerationRequest, Rollout, TrainBatch

TINY = "bundled:tiny_moe"
MICRO_BATCHES = 6  # can be shared out to 1, 2, 3 and 6 ranks
VERSION = 8  # of the learner; rollouts are from versions 0 to 8


def run_config(objective: str, *overrides: str) -> RunConfig:
    """A step that moves every weight smoothly in its gradient: AdamW with a large eps."""
    base = {
        "objective": objective,
        "model": {"routing_replay": True},
        "pipeline": {"lag": 2 * VERSION},
        "trainer": {"lr": 1e-2, "eps": 1e-2, "max_grad_norm": 1e9},
    }
    return build_config(base, overrides)


def make_rollouts() -> list[list[Rollout]]:
    """Five groups of four, of two lengths of prompts, with made-up rewards and versions."""
    engine = build_local_engine(TINY, "bfloat16", 64, records_routing=True)
    engine.load_weights(dict(load_model(TINY, torch.float32).named_parameters()), version=0)
    tokenizer = load_tokenizer(TINY)
    long, short = (build_config({"task": {"terms": terms}}).task for terms in (5, 3))
    prompts = [
        *Arithmetic(long, tokenizer, 0).prompts("train", 0, 3),
        *Arithmetic(short, tokenizer, 0).prompts("train", 0, 2),
    ]
    rollouts = engine.generate(GenerationRequest(prompts, 4, 24, 1.0, seed=1, top_logprobs=20))
    for index, rollout in enumerate(rollouts):
        rollout.reward = float(index % 3 == 0)
        rollout.versions = np.where(rollout.loss_mask, index % (VERSION + 1), -1).astype(np.int32)
    return [rollouts[start : start + 4] for start in range(0, 20, 4)]


def cut(groups: Sequence[Sequence[Rollout]], run: RunConfig, ranks: int = MICRO_BATCHES) -> list[TrainBatch]:
    """Micro-batches, a number that `ranks` divides; without what the objective does not ask an engine for."""
    rollouts = [rollout for group in groups for rollout in group]
    if not run.objective.num_top_logprobs:
        rollouts = [replace(rollout, top_ids=None, top_logp=None) for rollout in rollouts]
    return pack(rollouts, advantages(groups, run.objective), 400, ranks)


def drifted(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model whose policy is some way off the one that sampled."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.003 * torch.randn(parameter.shape, generator=generator))
    return moved


def make_learner(model: Any, run: RunConfig, ranks: TorchRanks | None) -> LocalLearner:
    """On the ranks of this process group, or (None) the plain learner of one process."""
    tokenizer, model = load_tokenizer(TINY), copy.deepcopy(model)
    if run.model.gradient_checkpointing:
        checkpoint_layers(model)
    if ranks is None:
        learner = LocalLearner(model, tokenizer, run)
    else:
        spread = partial(shard, mesh=init_device_mesh("cpu", (ranks.count,)), dtype=getattr(torch, run.model.dtype))
        learner = LocalLearner(model, tokenizer, run, ranks, spread)
    learner.version = VERSION
    return learner


@dataclass
class Step:
    """What is to be the same on any number of ranks."""

    loss: float
    gradient: Tensor | None  # on rank 0
    weights: Tensor | None
    metrics: dict[str, float]
    histograms: dict[str, list[float]]
    logp: list[Tensor]  # of this rank


def take_step(learner: LocalLearner, batches: Sequence[TrainBatch], old_weights: Mapping[str, Tensor] | None) -> Step:
    """One step of this rank with the others."""
    ranks, losses, loss_of = learner._ranks, [], learner._loss

    def noted(*args: Any) -> Any:
        output = loss_of(*args)
        losses.append(output.loss.detach().double())
        return output

    learner._loss = noted
    result = learner.train_step(share(batches, ranks.index, ranks.count), old_weights)
    parameters = list(learner._model.parameters())
    gradient = torch.cat([whole(parameter.grad).flatten() for parameter in parameters if parameter.grad is not None])
    weights = torch.cat([whole(parameter.detach()).flatten() for parameter in parameters])
    is_first = ranks.index == 0
    return Step(
        loss=float(ranks.sum(torch.stack(losses).sum())),
        gradient=gradient if is_first else None,
        weights=weights if is_first else None,
        metrics=result.metrics,
        histograms=result.histograms,
        logp=result.logp,
    )


Case = tuple[RunConfig, list[TrainBatch]]


def steps_of(cases: Mapping[str, Case], ranks: TorchRanks | None) -> dict[str, Step]:
    """A step from drifted weights for each case; frozen anchors are the weights that sampled."""
    sampled = load_model(TINY, torch.float32)
    model = drifted(sampled)
    old_weights = {name: parameter.detach() for name, parameter in sampled.named_parameters()}
    return {name: take_step(make_learner(model, run, ranks), part, old_weights) for name, (run, part) in cases.items()}


def same_step(ranks: Sequence[Step], one: Step) -> None:
    """Every rank has the numbers of the step of one process, to the rounding of float32."""
    first = ranks[0]
    assert first.gradient is not None
    assert one.gradient is not None
    assert 0 < one.gradient.norm() < math.inf
    assert (first.gradient - one.gradient).norm() <= 1e-5 * one.gradient.norm()
    torch.testing.assert_close(first.weights, one.weights, rtol=1e-5, atol=1e-6)
    for rank in ranks:
        assert rank.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-8)
        assert rank.metrics.keys() == one.metrics.keys()
        assert rank.metrics == pytest.approx(one.metrics, rel=1e-5, abs=1e-6, nan_ok=True)
        assert rank.metrics == pytest.approx(first.metrics, rel=0, abs=0, nan_ok=True)
        assert rank.histograms.keys() == one.histograms.keys()
        for name, values in one.histograms.items():
            assert rank.histograms[name] == pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True), name
    logp = [logp for rank in ranks for logp in rank.logp]
    for mine, whole_one in zip(logp, one.logp, strict=True):
        torch.testing.assert_close(mine, whole_one, rtol=1e-5, atol=1e-5)


def on_ranks(count: int, folder: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(ranks, *args)` on every one of `count` processes (1: this one); what each returns."""
    (folder / "rendezvous").unlink(missing_ok=True)
    if count == 1:
        _rank(0, count, str(folder), work, args)
    else:
        mp.spawn(_rank, args=(count, str(folder), work, args), nprocs=count)
    return [torch.load(folder / f"{index}.pt", weights_only=False) for index in range(count)]


def _rank(index: int, count: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    ranks = join(index, count, f"file://{folder}/rendezvous", timeout_s=300)
    torch.save(work(ranks, *args), f"{folder}/{index}.pt")
    leave()


def on_one_process(cases: Mapping[str, Case]) -> dict[str, Step]:
    """The plain learner, without a process group: the oracle."""
    return steps_of(cases, None)


def on_each_rank(ranks: TorchRanks, cases: Mapping[str, Case]) -> dict[str, Step]:
    return steps_of(cases, ranks)
