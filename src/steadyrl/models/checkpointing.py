"""Gradient checkpointing: memory for one layer's activations, paid with a second forward pass of every layer.

Not the switch of transformers, which acts only in training mode: there dropout and router noise are on too, and a
ratio must not move by chance. And the recomputation must use the experts of a routing replay that is over by then.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from steadyrl.errors import ConfigError
from steadyrl.models.routing import recompute_contexts


def checkpoint_layers(model: nn.Module) -> None:
    """Make every layer of `model` keep its input only, and run again in the backward pass. In place.

    Gradients are the same. Without gradients (generation, scoring) nothing changes.

    Raises:
        ConfigError: the model is not made of layers that transformers marks for it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers that can be recomputed: set model.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.forward = MethodType(_recomputed_forward, layer)  # a bound method follows its module into a deep copy


def _recomputed_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(layer).forward, layer, **kwargs)
    if not torch.is_grad_enabled():
        return forward(*args)
    return checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=partial(recompute_contexts, layer)
    )
