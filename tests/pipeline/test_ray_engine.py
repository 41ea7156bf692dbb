"""The engine's side of the Ray backend, without Ray: an ordinary object with a thread."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from pipeline.test_ray_backend import SPEC
from pipeline.test_splitting import request

from steadyrl.engines.base import weights_checksum
from steadyrl.engines.build import build_local_engine
from steadyrl.models.load import load_model
from steadyrl.pipeline.group_stream import Stragglers
from steadyrl.pipeline.inline_backend import InlineBackend
from steadyrl.pipeline.ray_engine import Admit, Answer, EngineActor, Generate, HasArrived, HasFailed, HasGenerated, Load
from steadyrl.pipeline.ray_transport import PackedWeights, pack_weights, unpack_rollouts

TINY = "bundled:tiny_moe"


@pytest.fixture(scope="module")
def weights() -> PackedWeights:
    return pack_weights(dict(load_model(TINY, torch.float32).named_parameters()), torch.float32)


@pytest.fixture
def actor() -> EngineActor:
    return EngineActor(dataclasses.replace(SPEC, model_path=TINY, dtype="float32"))


def answers(actor: EngineActor, number: int) -> list[Answer | HasFailed]:
    """So many; fails if they are not there within a minute."""
    heard: list[Answer | HasFailed] = []

    def listen() -> None:
        while len(heard) < number:
            heard.extend(actor.receive())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(60)
    assert len(heard) == number, f"{len(heard)} answers instead of {number}"
    return heard


def test_commands_are_obeyed_in_the_order_of_their_numbers(actor, weights):
    actor.send(2, Generate(request(2, first=2)), None)
    actor.send(1, Generate(request(2)), None)
    actor.send(0, Load(7), weights)
    loaded, first, second = answers(actor, 3)
    sent = {name: torch.from_numpy(bits) for name, bits in weights.bits.items()}
    assert loaded.checksum == weights_checksum(sent)
    inline = InlineBackend(
        build_local_engine(TINY, "float32", 8, False), torch.float32, Stragglers(0.0, are_kept=False)
    )
    inline.broadcast(sent, 7)
    for number, said, asked in ((1, first, request(2)), (2, second, request(2, first=2))):
        assert isinstance(said, HasGenerated)
        assert said.number == number
        assert said.start_s < said.end_s
        inline.submit(asked)
        expected = inline.collect().rollouts
        for one, other in zip(unpack_rollouts(said.rollouts), expected, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.behavior_logp.tolist() == other.behavior_logp.tolist()
            assert one.versions[one.loss_mask].tolist() == [7] * one.num_sampled


def test_groups_come_one_by_one_and_take_over_weights_on_the_way(actor, weights):
    actor.send(0, Load(0), weights)
    actor.send(1, Admit({10: request(1), 11: request(1, first=1)}), None)
    actor.send(2, Load(1), weights)
    arrived = [answer for answer in answers(actor, 4) if isinstance(answer, HasArrived)]
    assert sorted(answer.number for answer in arrived) == [10, 11]
    for answer in arrived:
        rollouts = unpack_rollouts(answer.rollouts)
        assert len(rollouts) == 3
        assert {version for one in rollouts for version in one.versions[one.loss_mask].tolist()} <= {0, 1}


def test_an_exception_is_told(actor, weights):
    actor.send(0, Load(0), weights)
    too_long = dataclasses.replace(request(1), max_response_tokens=100_000)
    actor.send(1, Generate(too_long), None)
    failed = answers(actor, 2)[1]
    assert isinstance(failed, HasFailed)
    assert "does not fit into the model's" in failed.trace
