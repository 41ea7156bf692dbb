"""The driver's side of the trainer ranks, over a Ray that lives in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline.fake_ray import Died, FakeRay, Later, NoPlace

from steadyrl.config import RunConfig
from steadyrl.errors import LearnerLostError, TrainingError
from steadyrl.pipeline import ray_learner
from steadyrl.pipeline.packing import pack
from steadyrl.pipeline.ray_cluster import RayCluster
from steadyrl.pipeline.ray_learner import RayLearner
from steadyrl.pipeline.ray_transport import pack_weights, unpack_batch
from steadyrl.recipe import load_config
from steadyrl.trainer.base import StepResult
from steadyrl.types import Rollout, TrainBatch

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"


class StubRank:
    """Says of every token the number of its rank plus its log-probability."""

    def __init__(self, config: RunConfig, index: int) -> None:
        self.index, self.version, self.calls = index, 0, []
        self.fails: Any = None

    def rendezvous(self) -> str:
        return f"tcp://rank-{self.index}"

    def start(self, rendezvous: str) -> None:
        self.calls.append(rendezvous)

    def train_step(self, packed: list[Any], old: Any) -> Any:
        if isinstance(self.fails, Exception):
            raise self.fails
        if self.fails is not None:
            return self.fails
        self.calls.append(old)
        self.version += 1
        batches = [unpack_batch(one) for one in packed]
        logp = [batch.behavior_logp + 100.0 * self.index for batch in batches]
        return StepResult({"loss": 0.5}, {"lag": [1.0]}, logp, [None for _ in logp])

    def named_weights(self) -> Any:
        self.calls.append("named_weights")
        return pack_weights({} if self.index else {"w": torch.full((2,), float(self.version))}, torch.float32)

    def save(self, folder: str) -> None:
        self.calls.append(("save", folder))

    def load(self, folder: str, version: int) -> None:
        self.version = version
        self.calls.append(("load", folder))


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(ray_learner, "load_ray", lambda: fake)
    monkeypatch.setattr(ray_learner, "RankActor", StubRank)
    monkeypatch.setattr(ray_learner, "GRACE_S", 0.05)
    return fake


def learner(ranks: int) -> RayLearner:
    sizes = ["pipeline.backend=ray", "trainer.kind=fsdp", f"trainer.ranks={ranks}"]
    return RayLearner(load_config(RECIPE, sizes), RayCluster([NoPlace() for _ in range(ranks)], []))  # type: ignore[misc]


def micro_batches(ranks: int, rollouts: int = 5) -> list[TrainBatch]:
    made = []
    for index in range(rollouts):
        n = 4 + index
        mask = np.arange(n) >= 2
        logp = np.where(mask, -0.001 * (np.arange(n) + 10 * index), 0).astype(np.float32)
        versions, tokens = np.where(mask, 0, -1).astype(np.int32), np.arange(n, dtype=np.int32)
        made.append(Rollout(f"train/{index}", index, tokens, mask, logp, versions, None, "stop", ""))
    return pack(made, torch.arange(float(rollouts)), 10, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_its_share_and_the_answers_come_in_the_order_of_the_batch(ray, ranks):
    made, batches = learner(ranks), micro_batches(ranks)
    result = made.train_step(batches, None)
    assert made.version == 1
    assert result.metrics["loss"] == 0.5
    assert result.histograms == {"lag": [1.0]}
    size = len(batches) // ranks
    for index, (batch, logp) in enumerate(zip(batches, result.logp, strict=True)):
        assert torch.equal(logp, batch.behavior_logp + 100.0 * (index // size))
    tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    # ids 1, attention 1, target 1, mask 1, logp 4, version 1 for a position, advantage 4 for a rollout
    sizes = sum(batch.input_ids.numel() * 9 + 4 * len(batch.advantage) for batch in batches)
    assert result.metrics["transport/batch_bytes_per_token"] == sizes / tokens


def test_ranks_meet_at_the_first_or_in_a_folder_where_there_is_one_for_them(ray):
    learner(2)
    assert [actor.instance.calls for actor in ray.actors] == [["tcp://rank-0"]] * 2
    config = load_config(RECIPE, ["pipeline.backend=ray"])
    RayLearner(config, RayCluster([NoPlace()], [], "/a/folder"))  # type: ignore[list-item]
    assert ray.actors[-1].instance.calls == ["file:///a/folder/ranks"]


def test_weights_are_gathered_once_for_a_version_by_all_ranks(ray):
    made = learner(2)
    assert made.named_weights()["w"].tolist() == [0.0, 0.0]
    made.named_weights()
    assert [actor.instance.calls.count("named_weights") for actor in ray.actors] == [1, 1]
    made.train_step(micro_batches(2), None)
    assert made.named_weights()["w"].tolist() == [1.0, 1.0]
    made.load(Path("x"), 7)
    assert made.named_weights()["w"].tolist() == [7.0, 7.0]
    assert made.version == 7


def test_old_weights_are_put_into_the_store_once(ray):
    made, puts = learner(2), []
    put = ray.put
    ray.put = lambda value: puts.append(value) or put(value)
    old, other = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    for weights in (old, old, other, None):
        made.train_step(micro_batches(2), weights)
    assert len(puts) == 2
    assert [given and given.bits["w"].tolist() for given in ray.actors[1].instance.calls[1:]] == [
        [1.0, 1.0],
        [1.0, 1.0],
        [0.0, 0.0],
        None,
    ]


def test_checkpoints_have_absolute_paths(ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learner(1).save(Path("here"))
    assert ray.actors[0].instance.calls[-1] == ("save", str(tmp_path / "here"))


def test_what_all_ranks_raise_is_raised_and_they_go_on(ray):
    made = learner(2)
    for actor in ray.actors:
        actor.instance.fails = TrainingError("the gradient is not finite")
    with pytest.raises(TrainingError, match=r"^the gradient is not finite$"):
        made.train_step(micro_batches(2), None)
    assert made.version == 0
    for actor in ray.actors:
        actor.instance.fails = None
    made.train_step(micro_batches(2), None)
    assert made.version == 1


@pytest.mark.parametrize("survivor", [Later(), RuntimeError("connection closed by peer"), None])
def test_a_dead_rank_loses_the_group(ray, survivor):
    """The others hang, fail, or have just finished."""
    made = learner(3)
    ray.actors[1].instance.fails = Died("killed by a test")
    ray.actors[0].instance.fails = ray.actors[2].instance.fails = survivor
    with pytest.raises(LearnerLostError, match="a trainer rank died: the actor died: killed by a test"):
        made.train_step(micro_batches(3), None)
    for call in (made.named_weights, lambda: made.save(Path("x"))):  # at once: nobody waits for a dead group
        with pytest.raises(LearnerLostError):
            call()


def test_a_rank_that_fails_alone_ends_the_run(ray):
    made = learner(2)
    ray.actors[0].instance.fails = Later()
    ray.actors[1].instance.fails = MemoryError("no room")
    with pytest.raises(TrainingError, match=r"a trainer rank failed:\n.*no room"):
        made.train_step(micro_batches(2), None)
    with pytest.raises(TrainingError, match="no room"):
        made.named_weights()


def test_a_rank_that_does_not_start_is_not_waited_for_longer_than_allowed(ray, monkeypatch):
    monkeypatch.setattr(StubRank, "start", lambda self, _rendezvous: Later())
    sizes = ["pipeline.backend=ray", "engine.start_timeout_s=0.05"]
    with pytest.raises(TrainingError, match=r"1 of 1 trainer ranks to start after 0 s: raise engine.start_timeout_s"):
        RayLearner(load_config(RECIPE, sizes), RayCluster([NoPlace()], []))  # type: ignore[list-item]
    assert ray.killed == ray.actors
