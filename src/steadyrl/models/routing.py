"""Rollout routing replay (R3, arXiv 2510.11370; SAT paper, eq. 40): record the experts, use them again.

The engine records which K experts every token went through in every MoE layer. The trainer sends the
token through the same experts and weighs them by a softmax over its *current* router logits of those
experts. The gradient reaches the router through these logits, also for an expert that the trainer
itself would no longer choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from steadyrl.errors import ConfigError

# Router modules that return (logits [tokens, E], weights [tokens, K], experts [tokens, K]) and weigh
# by a softmax over the logits. Another family is added by its class name, once its forward was read.
SOFTMAX_ROUTERS = frozenset({"Qwen3MoeTopKRouter"})


def routers(model: nn.Module) -> list[nn.Module]:
    """The MoE routers in layer order.

    Raises:
        ConfigError: the model has no router that this module knows how to read.
    """
    found = [module for module in model.modules() if type(module).__name__ in SOFTMAX_ROUTERS]
    if not found:
        raise ConfigError(
            f"model.routing_replay = true needs a mixture-of-experts model with one of the routers "
            f"{', '.join(sorted(SOFTMAX_ROUTERS))}, and {type(model).__name__} has none: set model.routing_replay=false"
        )
    return found


@contextmanager
def record_routing(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect, for each forward pass, the chosen experts [tokens, K], layer after layer."""
    chosen: list[Tensor] = []
    handles = [
        router.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
        for router in routers(model)
    ]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class RoutingReplay:
    """What a replayed forward pass saw: how often the trainer would have chosen other experts."""

    disagreements: list[Tensor] = field(default_factory=list)  # per layer, a 0-d count of tokens
    tokens: list[Tensor] = field(default_factory=list)  # per layer, a 0-d count of replayed tokens


@contextmanager
def replay_routing(model: nn.Module, routed_experts: Tensor) -> Iterator[RoutingReplay]:
    """Send every token through the recorded experts.

    Args:
        routed_experts: [S, W, L, K] int64; -1 (padding) leaves a token to the model's own choice.
    """
    seen = RoutingReplay()
    layers = routers(model)
    assert routed_experts.shape[2] == len(layers), "recorded layers and the model's MoE layers differ in number"
    recorded = routed_experts.flatten(0, 1)  # [S*W, L, K]: batch first, as the router flattens its input
    handles = [
        router.register_forward_hook(_ReplayHook(recorded[:, layer], seen)) for layer, router in enumerate(layers)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _ReplayHook:
    """Replaces the router's choice [tokens, K] by the recorded one."""

    def __init__(self, recorded: Tensor, seen: RoutingReplay) -> None:
        self.recorded = recorded
        self.seen = seen

    def __call__(self, module: nn.Module, _inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]):
        logits, weights, own = output
        replayed = self.recorded[:, :1] >= 0
        experts = torch.where(replayed, self.recorded, own)
        probs = logits.float().softmax(dim=-1).gather(-1, experts)
        if getattr(module, "norm_topk_prob", True):
            # over the chosen experts alone, from the logits: no 0/0 when all of them are improbable
            probs = logits.float().gather(-1, experts).softmax(dim=-1)
        with torch.no_grad():
            differs = (experts.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1)
            self.seen.disagreements.append((differs & replayed[:, 0]).sum())
            self.seen.tokens.append(replayed.sum())
        return logits, probs.to(weights.dtype), experts
