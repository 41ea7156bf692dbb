"""Layers that are run again in the backward pass: same gradients, also through a routing replay that is over."""

from __future__ import annotations

import copy

import pytest
import torch
from models.families import build
from torch import nn

from steadyrl.errors import ConfigError
from steadyrl.models.checkpointing import checkpoint_layers
from steadyrl.models.routing import record_routing, replay_routing

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


def loss(model: nn.Module) -> torch.Tensor:
    return model(IDS, use_cache=False).logits.log_softmax(-1)[..., 7].pow(2).sum()


class Calls:
    """How often a module was entered: a recomputation stops as soon as it has all it needs."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        module.register_forward_pre_hook(self)

    def __call__(self, *_):
        self.count += 1


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2", "Mixtral"])
def test_gradients_are_the_same_bits(family):
    model = build(family)
    loss(model).backward()
    wanted = gradients(model)
    checkpoint_layers(model)
    loss(model).backward()
    assert_equal(gradients(model), wanted)


def test_every_layer_runs_twice_with_a_backward_pass_and_once_without():
    model = build("Llama")
    checkpoint_layers(model)
    calls = [Calls(layer.mlp) for layer in model.model.layers]
    loss(model).backward()
    assert [call.count for call in calls] == [2, 2]
    with torch.no_grad():
        loss(model)
    assert [call.count for call in calls] == [3, 3]


def test_dropout_stays_off():
    model = build("OPT", dropout=0.5)  # its layers drop out by themselves, in training mode
    loss(model).backward()
    wanted = gradients(model)
    checkpoint_layers(model)
    loss(model).backward()
    assert_equal(gradients(model), wanted)
    assert not any(module.training for module in model.modules())


def test_a_deep_copy_runs_its_own_layers():
    model = build("Llama")
    checkpoint_layers(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
    loss(copied).backward()
    assert not gradients(model)
    wanted = build("Llama")
    loss(wanted).backward()
    assert_equal(gradients(copied), gradients(wanted))


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3", "GptOss"])
@pytest.mark.parametrize("still_open", [False, True])
def test_the_recomputation_goes_through_the_replayed_experts(family, still_open):
    """Two micro-batches with other records are in flight when the first one is recomputed."""
    model = build(family)
    with torch.no_grad(), record_routing(model) as chosen:
        model(IDS)
    experts = torch.stack(chosen, dim=1).unflatten(0, IDS.shape)
    records = [(experts + 1) % 6, (experts + 3) % 6]
    wanted = []
    for record in records:
        with replay_routing(model, record):
            value = loss(model)
        value.backward()
        wanted.append(gradients(model))
    assert any(not torch.equal(wanted[0][name], wanted[1][name]) for name in wanted[0])

    checkpoint_layers(model)
    losses, seen = [], []
    for record in records:
        with replay_routing(model, record) as replay:
            losses.append(loss(model))
            seen.append(replay)
            if still_open:
                losses[-1].backward()
                wanted_now = wanted[len(losses) - 1]
                assert_equal(gradients(model), wanted_now)
    if not still_open:
        for value, expected in zip(losses, wanted, strict=True):
            value.backward()
            assert_equal(gradients(model), expected)
    layers = len(chosen)
    assert [len(replay.tokens) for replay in seen] == [layers, layers]  # the recomputation is not counted again


def test_recording_counts_a_recomputed_layer_once():
    model = build("Qwen3Moe")
    checkpoint_layers(model)
    with record_routing(model) as chosen:
        loss(model).backward()
    assert len(chosen) == 2


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match=r"set model\.gradient_checkpointing=false"):
        checkpoint_layers(nn.Linear(2, 2))
