"""The optimizer and its learning rate."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from steadyrl.config import TrainerConfig

WHOLE = "optimizer.safetensors"
SLICES = "optimizer"  # a folder


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


def save_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Write the moments of every parameter under `<parameter name>/<moment>`.

    Whole ones go into `optimizer.safetensors`. Of parameters that are spread over ranks every rank writes its slices,
    into a file of its own in `optimizer/` (torch.distributed.checkpoint, which says in each where its slices belong).
    """
    tensors = {
        f"{name}/{moment}": value
        for name, parameter in parameters.items()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        save_file(tensors, folder / WHOLE)
        return
    # slow to import, and only needed where there are ranks
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder / SLICES), save_distributed=True))


def load_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Put back what `save_optimizer` wrote, with whatever number of ranks, into parameters spread in any way."""
    is_whole = (folder / WHOLE).exists()
    if is_whole and not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        tensors = load_file(folder / WHOLE)
    else:
        tensors = _load_slices(parameters, folder if is_whole else folder / SLICES)
    for name, value in tensors.items():
        parameter, _, moment = name.rpartition("/")
        optimizer.state[parameters[parameter]][moment] = value.to(parameters[parameter].device)


def _load_slices(parameters: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Moments from the safetensors files in a folder, spread as their parameters are."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name, moment in found.items():
        parameter = parameters[name.rpartition("/")[0]]
        assert isinstance(moment, TensorStorageMetadata)
        spread = moment.size == parameter.shape  # else the count of steps
        tensors[name] = torch.zeros_like(parameter) if spread else torch.zeros(moment.size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    return tensors
