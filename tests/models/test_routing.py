"""Routing replay: the recorded experts are used, weighed by today's router, and teach it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from steadyrl.errors import ConfigError
from steadyrl.models.routing import record_routing, replay_routing, routers


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
    with torch.no_grad(), replay_routing(model, rows) as seen:
        out = model(input_ids=padded, attention_mask=mask).logits
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
