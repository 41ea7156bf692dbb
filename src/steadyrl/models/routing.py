"""Rollout routing replay (R3, arXiv 2510.11370; SAT paper, eq. 40): record the experts, use them again.

The engine records which K experts every token went through in every MoE layer. The trainer sends the
token through the same experts and weighs them as its router would, from its *current* logits of those
experts. The gradient reaches the router through these logits, also for an expert that the trainer
itself would no longer choose.

A model's routers are read through a table, `ROUTERS`: a router returns (logits, weights, experts), and a row says
how the weights follow from the logits of the chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steadyrl.errors import ConfigError, EngineError


@dataclass(frozen=True)
class Weighing:
    """How a router weighs the experts that were chosen, whoever chose them.

    A correction that only steers the choice (a bias for balance, groups of experts) has no part in it.
    """

    score: Literal["softmax", "sigmoid", "score_fn", "given"]  # over all experts; given: the router returns scores
    # divided by their sum over the chosen experts; or the router's attribute that says whether they are
    normalized: bool | Literal["norm_topk_prob"]
    scale: str = ""  # attribute of the router: a factor, or one for each expert
    epsilon: float = 0.0  # added to the sum

    def weights(self, router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
        """[tokens, K] float32 from the router's first output [tokens, E] and experts [tokens, K]."""
        logits = logits.float()
        normalized = self.normalized if isinstance(self.normalized, bool) else bool(getattr(router, self.normalized))
        if self.score == "softmax" and normalized:
            # over the chosen experts alone: no 0/0 when all of them are improbable
            weights = logits.gather(-1, experts).softmax(dim=-1)
        else:
            weights = self._scores(router, logits).gather(-1, experts)
            if normalized:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + self.epsilon)
        if self.scale:
            scale = getattr(router, self.scale)
            weights = weights * (scale[experts] if isinstance(scale, Tensor) and scale.ndim else scale)
        return weights

    def _scores(self, router: nn.Module, logits: Tensor) -> Tensor:
        if self.score == "softmax":
            return logits.softmax(dim=-1)
        if self.score == "sigmoid":
            return logits.sigmoid()
        return logits if self.score == "given" else getattr(router, self.score)(logits)


_QWEN = Weighing("softmax", "norm_topk_prob")
_MIXTRAL = Weighing("softmax", True)
_DEEPSEEK = Weighing("sigmoid", "norm_topk_prob", scale="routed_scaling_factor", epsilon=1e-20)

# By the class name of the router module, each row written from its forward. To add one: a module that is called
# once for each MoE layer and returns (logits [tokens, E], weights [tokens, K], experts [tokens, K], ...).
ROUTERS: dict[str, Weighing] = {
    **dict.fromkeys(
        (
            "FlexOlmoTopKRouter",
            "LaraMiniTopKRouter",
            "MellumTopKRouter",
            "OlmoeTopKRouter",
            "Qwen2MoeTopKRouter",
            "Qwen3MoeTopKRouter",
            "Qwen3NextTopKRouter",
            "Qwen4ExpTextTopKRouter",
        ),
        _QWEN,
    ),
    **dict.fromkeys(
        (
            "AriaTextTopKRouter",
            "Ernie4_5_MoeTopKRouter",
            "GptOssTopKRouter",
            "GraniteMoeHybridTopKRouter",
            "GraniteMoeSWATopKRouter",
            "GraniteMoeSharedTopKRouter",
            "GraniteMoeTopKRouter",
            "HunYuanMoEV1Gate",
            "MiniMaxTopKRouter",
            "MixtralTopKRouter",
            "Qwen3_5MoeTopKRouter",
        ),
        _MIXTRAL,
    ),
    **dict.fromkeys(
        (
            "AXK1TopkRouter",
            "AXK2TopkRouter",
            "BailingHybridTopkRouter",
            "DeepseekV32TopkRouter",
            "DeepseekV3TopkRouter",
            "Dots1TopkRouter",
            "Dots3NoteTextTopkRouter",
            "ExaoneMoeTopkRouter",
            "Glm4MoeLiteTopkRouter",
            "Glm4MoeTopkRouter",
            "GlmMoeDsaTopkRouter",
            "HYV4TopkRouter",
            "KimiLinearTopkRouter",
            "MiMoV2FlashTopkRouter",
            "NemotronHTopkRouter",
            "SolarOpenTopkRouter",
        ),
        _DEEPSEEK,
    ),
    "AfmoeTokenChoiceRouter": Weighing("sigmoid", True, scale="route_scale", epsilon=1e-20),
    "BeamTopKRouter": Weighing("sigmoid", "norm_topk_prob", epsilon=1e-20),
    "DeepseekV2TopkRouter": Weighing("softmax", False, scale="routed_scaling_factor"),
    "DeepseekV4TopKRouter": Weighing("score_fn", True, scale="routed_scaling_factor", epsilon=1e-20),
    "FlintTopKRouter": Weighing("sigmoid", "norm_topk_prob"),
    "Gemma4TextRouter": Weighing("given", True, scale="per_expert_scale"),
    "HYV3TopKRouter": Weighing("sigmoid", True, scale="router_scaling_factor", epsilon=1e-20),
    "Inkling2LoopTopKRouter": Weighing("score_fn", True, scale="routed_scaling_factor", epsilon=1e-20),
    "Inkling2TopKRouter": Weighing("score_fn", True, scale="routed_scaling_factor", epsilon=1e-20),
    "JambaTopKRouter": Weighing("softmax", False),
    "Kolibri1TopKRouter": Weighing("sigmoid", "norm_topk_prob"),
    "LagunaTopKRouter": Weighing("sigmoid", True),
    "Lfm2MoeTopKRouter": Weighing("sigmoid", "norm_topk_prob", scale="routed_scaling_factor", epsilon=1e-6),
    "LongcatFlashTopkRouter": Weighing("softmax", False, scale="routed_scaling_factor"),
    "MiniMaxM2TopKRouter": Weighing("sigmoid", True),
    "MiniMaxM3VLTopKRouter": Weighing("sigmoid", True),
    "Mistral4TopkRouter": Weighing("softmax", "norm_topk_prob", scale="routed_scaling_factor", epsilon=1e-20),
}


def routers(model: nn.Module) -> list[nn.Module]:
    """The MoE routers in layer order.

    Raises:
        ConfigError: the model has no router that this module knows how to read.
    """
    found = [module for module in model.modules() if type(module).__name__ in ROUTERS]
    if not found:
        names = {type(module).__name__ for module in model.modules()}
        unknown = sorted(name for name in names if name.endswith(("Router", "Gate", "Gating")))
        raise ConfigError(
            f"model.routing_replay = true needs a mixture-of-experts model whose router is known, and "
            f"{type(model).__name__} has "
            + (f"{', '.join(unknown)}: add a row for it to ROUTERS in models/routing.py" if unknown else "none")
            + ", or set model.routing_replay=false"
        )
    return found


class _RouterHook:
    """A forward hook on one router. In a recomputed forward pass (gradient checkpointing) it counts nothing again."""

    recomputing = False


class _RecordHook(_RouterHook):
    def __init__(self, chosen: list[Tensor]) -> None:
        self.chosen = chosen

    def __call__(self, _module: nn.Module, _inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        if not self.recomputing:
            self.chosen.append(output[2])


@contextmanager
def record_routing(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect, for each forward pass, the chosen experts [tokens, K], layer after layer."""
    chosen: list[Tensor] = []
    hook = _RecordHook(chosen)
    with _hooked([(router, hook) for router in routers(model)]):
        yield chosen


@dataclass
class RoutingReplay:
    """What a replayed forward pass saw: how often the trainer would have chosen other experts."""

    disagreements: list[Tensor] = field(default_factory=list)  # per layer, a 0-d count of tokens
    tokens: list[Tensor] = field(default_factory=list)  # per layer, a 0-d count of replayed tokens


class _ReplayHook(_RouterHook):
    """Replaces the router's choice [tokens, K] by the recorded one."""

    def __init__(self, recorded: Tensor, seen: RoutingReplay) -> None:
        self.recorded = recorded
        self.seen = seen

    def __call__(self, module: nn.Module, _inputs: tuple[Tensor, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
        logits, weights, own, *rest = output
        assert self.recorded.shape == own.shape, "recorded experts are those of other tokens, or of another top-k"
        replayed = self.recorded[:, :1] >= 0
        experts = torch.where(replayed, self.recorded, own)
        used = ROUTERS[type(module).__name__].weights(module, logits, experts)
        if not self.recomputing:
            with torch.no_grad():
                differs = (experts.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1)
                self.seen.disagreements.append((differs & replayed[:, 0]).sum())
                self.seen.tokens.append(replayed.sum())
        return (logits, used.to(weights.dtype), experts, *rest)


@contextmanager
def replay_routing(model: nn.Module, routed_experts: Tensor) -> Iterator[RoutingReplay]:
    """Send every token through the recorded experts.

    The context may be left before the backward pass, also when layers are recomputed in it, if the layers were
    prepared by `models.checkpointing`.

    Args:
        routed_experts: [S, W, L, K] int64, on the model's device; -1 (padding) leaves a token to the model's own
            choice. A packed row is S = 1.

    Raises:
        EngineError: a token's record names an expert twice.
    """
    seen = RoutingReplay()
    layers = routers(model)
    assert routed_experts.shape[2] == len(layers), "recorded layers and the model's MoE layers differ in number"
    _check_distinct(routed_experts)
    recorded = routed_experts.flatten(0, 1)  # [S*W, L, K]: batch first, as the router flattens its input
    with _hooked([(router, _ReplayHook(recorded[:, layer], seen)) for layer, router in enumerate(layers)]):
        yield seen


def recompute_contexts(layer: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint`: what to enter around a layer's forward pass, and around its recomputation.

    The recomputation goes through the experts that are being replayed *now*, whatever is replayed then.
    """
    hooks = [
        (module, hook)
        for module in layer.modules()
        for hook in module._forward_hooks.values()
        if isinstance(hook, _RouterHook)
    ]
    return nullcontext(), _recomputing(hooks)


@contextmanager
def _recomputing(hooks: list[tuple[nn.Module, _RouterHook]]) -> Iterator[None]:
    left = [(router, hook) for router, hook in hooks if hook not in router._forward_hooks.values()]
    for _, hook in hooks:
        hook.recomputing = True
    try:
        with _hooked(left):
            yield
    finally:
        for _, hook in hooks:
            hook.recomputing = False


@contextmanager
def _hooked(hooks: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [router.register_forward_hook(hook) for router, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_distinct(routed_experts: Tensor) -> None:
    """A record that was never filled in has one expert K times; used as it is, it would train on another model."""
    ordered = routed_experts.sort(dim=-1).values
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(dim=-1)
    if bool(twice.any()):
        row, position, layer = (int(i) for i in twice.nonzero()[0])
        raise EngineError(
            f"the routing recorded for token {position} of row {row} names an expert twice in MoE layer {layer}: the "
            "engine did not record it; set model.routing_replay=false, or use an engine that records every token"
        )
