"""The optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from steadyrl.config import TrainerConfig


def make_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: TrainerConfig, step: int) -> float:
    """The rate of optimizer step `step` (counted from 0): a linear warm-up, constant afterwards."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    return config.lr


def save_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], path: Path) -> None:
    """Write the moments of every parameter under `<parameter name>/<moment>`."""
    tensors = {
        f"{name}/{moment}": value
        for name, parameter in parameters.items()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }
    save_file(tensors, path)


def load_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], path: Path) -> None:
    """Put back what `save_optimizer` wrote."""
    for name, value in load_file(path).items():
        parameter, _, key = name.rpartition("/")
        optimizer.state[parameters[parameter]][key] = value
