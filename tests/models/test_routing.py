"""Routing replay: the recorded experts are used, weighed by today's router, and teach it."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from models.families import MIXTURES, build
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from steadyrl.errors import ConfigError, EngineError
from steadyrl.models.routing import ROUTERS, record_routing, replay_routing, routers


def recorded(model, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and experts [S, W, L, K] of a plain pass."""
    with torch.no_grad(), record_routing(model) as chosen:
        logits = model(ids).logits
    return logits, torch.stack(chosen, dim=1).unflatten(0, ids.shape)


@pytest.fixture
def ids():
    return torch.randint(3, 90, (3, 7), generator=torch.Generator().manual_seed(0))


def test_replaying_one_s_own_choice_changes_nothing(model, ids):
    logits, experts = recorded(model, ids)
    with torch.no_grad(), replay_routing(model, experts) as seen:
        replayed = model(ids).logits
    torch.testing.assert_close(replayed, logits, atol=1e-5, rtol=1e-5)
    assert sum(int(count) for count in seen.disagreements) == 0
    assert [int(count) for count in seen.tokens] == [21] * 3


def test_each_token_gets_its_own_row(model, ids):
    """Replaying row by row what was recorded in a batch gives that batch's numbers."""
    logits, experts = recorded(model, ids)
    for row in range(3):
        with torch.no_grad(), replay_routing(model, experts[row : row + 1]):
            alone = model(ids[row : row + 1]).logits
        torch.testing.assert_close(alone[0], logits[row], atol=1e-4, rtol=1e-4)


def test_other_experts_are_really_used(model, ids):
    logits, experts = recorded(model, ids)
    shifted = (experts + 3) % 8
    with torch.no_grad(), replay_routing(model, shifted) as seen:
        other = model(ids).logits
    assert (other - logits).abs().max() > 0.1
    assert sum(int(count) for count in seen.disagreements) > 0


def test_the_weights_are_a_softmax_over_today_s_logits_of_these_experts(model, ids):
    _, experts = recorded(model, ids)
    layer = routers(model)[0]
    outputs = []
    handle = layer.register_forward_hook(lambda _m, _i, output: outputs.append(output))
    with torch.no_grad(), replay_routing(model, (experts + 1) % 8):
        # hooks run in the order of registration: this one sees what the router itself said
        model(ids)
    handle.remove()
    logits = outputs[0][0]
    outputs.clear()
    wanted = (experts[:, :, 0].flatten(0, 1) + 1) % 8
    with torch.no_grad(), replay_routing(model, (experts + 1) % 8):
        handle = layer.register_forward_hook(lambda _m, _i, output: outputs.append(output))
        model(ids)
    handle.remove()
    used_logits, weights, chosen = outputs[0]
    torch.testing.assert_close(used_logits, logits)
    assert torch.equal(chosen, wanted)
    exponentials = logits.exp().gather(-1, wanted)
    torch.testing.assert_close(weights, exponentials / exponentials.sum(-1, keepdim=True))


def test_the_router_learns_also_about_experts_outside_its_top_k(model, ids):
    _, experts = recorded(model, ids)
    foreign = (experts + 4) % 8
    with replay_routing(model, foreign):
        model(ids).logits.float().log_softmax(-1)[..., 5].sum().backward()
    for layer, router in enumerate(routers(model)):
        gradient = router.weight.grad.abs().sum(dim=1)
        used = set(foreign[:, :, layer].flatten().tolist())
        assert all((gradient[expert] > 0) == (expert in used) for expert in range(8))


def test_padding_is_left_to_the_model_and_changes_nothing(model, ids):
    logits, experts = recorded(model, ids)
    padded = torch.cat([ids, torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    rows = torch.cat([experts, torch.full((3, 4, 3, 2), -1)], dim=1)
    # hooks run in the order of registration: the recorders see the experts before and after the replay
    with (
        torch.no_grad(),
        record_routing(model) as own,
        replay_routing(model, rows) as seen,
        record_routing(model) as used,
    ):
        out = model(input_ids=padded, attention_mask=mask).logits
    for before, after in zip(own, used, strict=True):
        assert torch.equal(after.view(3, 11, 2)[:, 7:], before.view(3, 11, 2)[:, 7:])  # not all to expert 0
    torch.testing.assert_close(out[:, :7], logits, atol=1e-4, rtol=1e-4)
    assert [int(count) for count in seen.tokens] == [21] * 3


def test_nothing_is_left_over_after_a_replay(model, ids):
    logits, experts = recorded(model, ids)
    with torch.no_grad(), replay_routing(model, (experts + 2) % 8):
        model(ids)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)


def test_a_model_without_a_router_is_refused():
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(ConfigError, match=r"model\.routing_replay=false"):
        routers(LlamaForCausalLM(config))


# --- every family ------------------------------------------------------------------------------------------------


def router_class(name: str) -> type[nn.Module]:
    folder = Path(transformers.__file__).parent / "models"
    for file in folder.glob("*/modeling_*.py"):
        if f"\nclass {name}(" in file.read_text(encoding="utf-8"):
            return getattr(importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}"), name)
    raise AssertionError(f"transformers has no {name}")


# where a config's defaults have no experts, or one of them for each token
SETTINGS = {
    "DeepseekV2TopkRouter": {"n_routed_experts": 8, "num_experts_per_tok": 3, "topk_method": "greedy"},
    "Dots1TopkRouter": {"n_routed_experts": 8, "num_experts_per_tok": 3},
    "Gemma4TextRouter": {"num_experts": 8, "top_k_experts": 3, "enable_moe_block": True},
    "HunYuanMoEV1Gate": {"num_experts": 8, "moe_topk": 3},
}


def router_alone(name: str) -> nn.Module:
    """A router of the sizes of its config's defaults, with random weights, biases and factors."""
    cls = router_class(name)
    configs = importlib.import_module(cls.__module__.replace(".modeling_", ".configuration_"))
    families = [config for config in vars(configs) if config.endswith("Config") and config.startswith(name[:4])]
    # of a multimodal family, the part that reads text
    config = min(families, key=lambda config: ("Text" not in config and len(families) > 1, len(config)))
    router = cls(getattr(configs, config)(**SETTINGS.get(name, {})))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            if tensor.ndim == 2:
                tensor.normal_(std=tensor.shape[1] ** -0.5, generator=generator)
            elif tensor.ndim == 1:
                tensor.uniform_(0.1, 0.9, generator=generator)
    return router.eval()


def run_router(router: nn.Module, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Its output for random tokens. A router that is handed its bias of the choice gets a random one."""
    experts, width = next(parameter.shape for parameter in router.parameters() if parameter.ndim == 2)
    hidden = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(1))
    if not type(router).__name__.startswith("Afmoe"):
        hidden = hidden[0]
    extra = [torch.linspace(0.1, 0.9, experts)] * (len(inspect.signature(router.forward).parameters) - 1)
    return router(hidden, *extra)[:3]


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_a_row_of_the_table_gives_the_router_s_own_weights(name):
    """Oracle: the forward pass of the router itself, for the experts that it chose."""
    router = router_alone(name)
    for normalized in (True, False) if hasattr(router, "norm_topk_prob") else (None,):
        if normalized is not None:
            router.norm_topk_prob = normalized
        with torch.no_grad():
            logits, weights, experts = run_router(router, 5)
            found = ROUTERS[name].weights(router, logits, experts)
        assert weights.std() > 0
        torch.testing.assert_close(found, weights.float(), atol=1e-5, rtol=1e-4)


def decode(model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """As an engine does: a prompt of three tokens, then token by token with a KV cache."""
    cache, logits, experts = DynamicCache(config=model.config), [], []
    with torch.no_grad(), record_routing(model) as chosen:
        for start, stop in [(0, 3), *((i, i + 1) for i in range(3, ids.shape[1]))]:
            logits.append(model(input_ids=ids[:, start:stop], cache=cache, use_cache=True).logits)
            experts.append(torch.stack(chosen, dim=1).unflatten(0, (len(ids), -1)))
            chosen.clear()
    return torch.cat(logits, dim=1), torch.cat(experts, dim=1)


@pytest.mark.parametrize("family", MIXTURES)
def test_what_was_recorded_token_by_token_is_replayed_in_one_pass(family):
    model = build(family)
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    logits, experts = decode(model, ids)
    with torch.no_grad(), replay_routing(model, experts) as seen:
        replayed = model(ids, use_cache=False).logits
    torch.testing.assert_close(replayed, logits, atol=5e-5, rtol=1e-5)
    assert [int(count) for count in seen.tokens] == [16] * experts.shape[2]
    assert sum(int(count) for count in seen.disagreements) == 0

    # other experts, as an engine in another precision would record them: they are used, and the router learns there
    foreign = (experts + 1) % 6
    with replay_routing(model, foreign) as seen:
        other = model(ids, use_cache=False).logits
    assert (other - logits).abs().max() > 0.05
    assert sum(int(count) for count in seen.disagreements) > 0
    other.log_softmax(-1)[..., 5].sum().backward()
    for layer, router in enumerate(routers(model)):
        weight = next(parameter for parameter in router.parameters() if parameter.shape[0] == 6 and parameter.ndim == 2)
        assert all(bool(weight.grad[expert].any()) for expert in foreign[:, :, layer].unique().tolist())


def test_a_packed_row_replays_what_its_sequences_recorded():
    """Two sequences of different length in one row, told apart by their positions."""
    model = build("Qwen3Moe")
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 60, (1, length), generator=generator) for length in (5, 3)]
    alone = [decode(model, ids) for ids in sequences]
    experts = torch.cat([(record + 1) % 6 for _, record in alone], dim=1)
    separate = []
    for ids, (_, record) in zip(sequences, alone, strict=True):
        with torch.no_grad(), replay_routing(model, (record + 1) % 6):
            separate.append(model(ids, use_cache=False).logits)
    positions = torch.cat([torch.arange(5), torch.arange(3)]).unsqueeze(0)
    with torch.no_grad(), replay_routing(model, experts):
        packed = model(torch.cat(sequences, dim=1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), atol=1e-5, rtol=1e-5)


def test_more_than_255_experts_keep_their_ids():
    model = build("Qwen3Moe", num_experts=300)
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    _, experts = decode(model, ids)
    assert experts.max() > 255
    high = torch.stack([torch.full_like(experts[..., 0], 299), torch.full_like(experts[..., 0], 43)], dim=-1)
    with torch.no_grad(), replay_routing(model, high), record_routing(model) as used:
        model(ids, use_cache=False)  # hooks run in the order of registration: the recorder sees what the experts get
    assert torch.equal(torch.stack(used, dim=1).unflatten(0, ids.shape), high)


def test_a_record_that_names_an_expert_twice_is_refused(model, ids):
    _, experts = recorded(model, ids)
    experts[1, 4, 2] = 0
    refused = pytest.raises(EngineError, match=r"token 4 of row 1 names an expert twice in MoE layer 2")
    with refused, replay_routing(model, experts):
        pass


def test_an_unknown_router_is_named_with_the_way_to_add_it():
    model = build("Phimoe", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ConfigError, match=r"PhimoeTopKRouter: add a row for it to ROUTERS in models/routing\.py"):
        routers(model)
