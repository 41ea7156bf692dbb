"""Every objective on one, two and three ranks takes the step of one process; checkpoints fit any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from trainer.rank_runs import (
    TINY,
    VERSION,
    Case,
    cut,
    make_learner,
    make_rollouts,
    on_each_rank,
    on_one_process,
    on_ranks,
    run_config,
    same_step,
)

from steadyrl.models.load import load_model
from steadyrl.pipeline.packing import share
from steadyrl.presets import PRESETS
from steadyrl.trainer.fsdp_learner import FsdpLearner
from steadyrl.trainer.learner import LocalLearner
from steadyrl.trainer.ranks import join, leave
from steadyrl.trainer.sharding import whole
from steadyrl.types import TrainBatch

ONE_SHORT_GROUP = "one short group: ranks without work"
OWN_ROUTING = "without routing replay"
STEP_START = "weights from the start of the batch"
RECOMPUTED = "layers recomputed"
ROUNDED = "bfloat16"


def cases_of(groups: Any) -> dict[str, Case]:
    """Every preset on the same micro-batches; then what is not an objective."""
    cases = {name: (run_config(name), cut(groups, run_config(name))) for name in PRESETS}
    run = run_config("sat-gspo")
    cases[ONE_SHORT_GROUP] = run, cut(groups[3:4], run)
    run = run_config("sat-gspo", "model.routing_replay=false")
    cases[OWN_ROUTING] = run, cut(groups, run)
    run = run_config("sat-grpo", "objective.anchor=step_start", "pipeline.steps_per_batch=2")
    cases[STEP_START] = run, cut(groups, run)
    for name, override in ((RECOMPUTED, "gradient_checkpointing=true"), (ROUNDED, "dtype=bfloat16")):
        run = run_config("sat-gspo", f"model.{override}")
        cases[name] = run, cut(groups, run)
    return cases


@pytest.fixture(scope="module")
def groups() -> Any:
    return make_rollouts()


@pytest.fixture(scope="module")
def cases(groups: Any) -> dict[str, Case]:
    return cases_of(groups)


@pytest.fixture(scope="module")
def one(cases: dict[str, Case]) -> Any:
    return on_one_process(cases)


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: Any, cases: dict[str, Case], tmp_path_factory: Any) -> list[Any]:
    return on_ranks(request.param, tmp_path_factory.mktemp("ranks"), on_each_rank, cases)


@pytest.mark.parametrize("name", [*PRESETS, ONE_SHORT_GROUP, OWN_ROUTING, STEP_START, RECOMPUTED])
def test_any_number_of_ranks_takes_the_step_of_one_process(one: Any, ranks: list[Any], name: str) -> None:
    same_step([rank[name] for rank in ranks], one[name])


def test_bfloat16_gives_nearly_the_same_gradient(one: Any, ranks: list[Any]) -> None:
    rounded, plain = ranks[0][ROUNDED].gradient, one["sat-gspo"].gradient
    assert 0.9 < float(torch.cosine_similarity(rounded, plain, dim=0)) < 0.99999


Held = dict[str, Tensor]
AVERAGED = "sat-grpo-ema"  # has a state of its own: the average of the quantile
# ranks, and the checkpoints that they load and write
JOURNEY = [(2, None, "two"), (1, "two", "one"), (3, "one", "three"), (3, "local", None), (2, "three", None)]


def held(learner: LocalLearner) -> Held:
    """Weights and moments, whole."""
    parameters = dict(learner._model.named_parameters())
    state = {
        f"{name}/{moment}": value
        for name, parameter in parameters.items()
        for moment, value in learner._optimizer.state[parameter].items()
    }
    return {name: whole(value.detach()).clone() for name, value in (parameters | state).items()}


def travel(index: int, folder: str, batches: list[TrainBatch]) -> None:
    """One of three processes, of which some form the ranks of each stage. Two steps at the start, one at the end."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    run = run_config(AVERAGED, "trainer.kind=fsdp", "pipeline.backend=ray")
    for stage, (count, before, after) in enumerate(JOURNEY):
        if index >= count:
            continue
        learner = FsdpLearner(run, join(index, count, f"file://{folder}/rendezvous-{stage}"))
        learner.version = VERSION
        mine = share(batches, index, count)
        if before is None:
            for _ in range(2):
                learner.train_step(mine, None)
        else:
            learner.load(Path(folder, before), version=VERSION + 2)
        if after is not None:
            learner.save(Path(folder, after))
        state = held(learner)
        metrics = learner.train_step(mine, None).metrics if stage == len(JOURNEY) - 1 else None
        torch.save((state, metrics), f"{folder}/{stage}-{index}.pt")
        leave()


def test_a_checkpoint_goes_from_two_ranks_to_one_to_three_to_two(groups: Any, tmp_path: Path) -> None:
    run = run_config(AVERAGED)
    batches = cut(groups, run)
    for name in ("two", "one", "three", "local"):
        (tmp_path / name).mkdir()
    single = make_learner(load_model(TINY, torch.float32), run, None)
    for _ in range(2):
        single.train_step(batches, None)
    single.save(tmp_path / "local")
    mp.spawn(travel, args=(str(tmp_path), batches), nprocs=3)
    stages = [torch.load(tmp_path / f"{stage}-0.pt") for stage in range(len(JOURNEY))]
    wanted = stages[0][0]
    for stage in (1, 2, 4):
        same(stages[stage][0], wanted)
    same(stages[3][0], held(single))
    other = make_learner(load_model(TINY, torch.float32), run, None)  # a process without ranks is one more number
    other.load(tmp_path / "three", version=VERSION + 2)
    same(held(other), wanted)
    assert torch.load(tmp_path / "4-1.pt")[1] == pytest.approx(stages[4][1], rel=0, abs=0, nan_ok=True)
    assert other.train_step(batches, None).metrics == pytest.approx(stages[4][1], rel=1e-5, abs=1e-6, nan_ok=True)
    for path in (tmp_path / "local" / "model").iterdir():  # any tool reads the one as it reads the other
        for name in ("two", "one", "three"):
            file = tmp_path / name / "model" / path.name
            assert file.stat().st_size == path.stat().st_size, file
            assert path.suffix != ".json" or file.read_text() == path.read_text(), file


def same(found: Held, wanted: Held) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
