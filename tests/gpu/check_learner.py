"""The learner on a GPU against itself on the CPU: the local one, and one FSDP rank over NCCL. Not part of `make test`.

    PYTHONPATH=tests python tests/gpu/check_learner.py

float32 on the GPU has to give the CPU's step to its rounding, bfloat16 nearly its gradient. Prints a line for each and
ends with an error if one is off.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trainer.rank_runs import TINY, VERSION, cut, make_rollouts, run_config

from steadyrl.models.load import load_policy, load_tokenizer
from steadyrl.trainer.fsdp_learner import FsdpLearner
from steadyrl.trainer.learner import LocalLearner
from steadyrl.trainer.ranks import TorchRanks, join, leave
from steadyrl.trainer.sharding import whole

FSDP = ("trainer.kind=fsdp", "pipeline.backend=ray")
LEARNERS = {
    "local float32": ((), 1e-3),
    "local bfloat16": (("model.dtype=bfloat16",), 0.5),
    "fsdp float32": (FSDP, 1e-3),
    "fsdp bfloat16": ((*FSDP, "model.dtype=bfloat16"), 0.5),
    "fsdp float32, recomputed": ((*FSDP, "model.gradient_checkpointing=true"), 1e-3),
}


def step(overrides: tuple[str, ...], ranks: TorchRanks | None, groups: Any) -> tuple[Tensor, dict[str, float], float]:
    """Gradient on the CPU, metrics, and seconds of the second of two steps."""
    run = run_config("sat-gspo", *overrides)
    batches = cut(groups, run, ranks=1)
    if run.trainer.kind == "fsdp":
        assert ranks is not None
        learner: LocalLearner = FsdpLearner(run, ranks)
    else:
        learner = LocalLearner(load_policy(run.model), load_tokenizer(TINY), run)
    learner.version = VERSION
    metrics = learner.train_step(batches, None).metrics
    gradients = [whole(p.grad).flatten().cpu() for p in learner._model.parameters() if p.grad is not None]
    start = time.monotonic()
    learner.train_step(batches, None)
    seconds = time.monotonic() - start
    with tempfile.TemporaryDirectory() as folder:
        learner.save(Path(folder))
        learner.load(Path(folder), learner.version)
    learner.train_step(batches, None)
    return torch.cat(gradients), metrics, seconds


def main() -> None:
    assert torch.cuda.is_available(), "this needs a GPU"
    groups = make_rollouts()
    wanted, wanted_metrics, seconds = step(("trainer.device=cpu",), None, groups)
    print(f"{'cpu float32':28} {seconds:.3f} s a step")
    with tempfile.TemporaryDirectory() as folder:
        ranks = join(0, 1, f"file://{folder}/rendezvous")
        for name, (overrides, tolerance) in LEARNERS.items():
            found, metrics, seconds = step((*overrides, "trainer.device=cuda"), ranks, groups)
            off = float((found - wanted).norm() / wanted.norm())
            drift = abs(metrics["mismatch/d_bar"] - wanted_metrics["mismatch/d_bar"])
            print(f"{name:28} {seconds:.3f} s a step, gradient off by {off:.2e}, d-bar by {drift:.2e}")
            assert off < tolerance, name
        leave()


if __name__ == "__main__":
    main()
