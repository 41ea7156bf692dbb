"""A model spread over the ranks with FSDP2: each holds a slice of every parameter, gradient and moment.

A layer is put together from its slices just before it runs, forward and backward, and taken apart after. Slices are
DTensors: `whole` and `own_part` go from a slice to the parameter and back, and leave a plain tensor as it is.

Expert parallelism has its place in `shard`: give the expert parameters of each layer to a second dimension of the mesh
before `fully_shard` takes the layer (they are [E, ...], so a rank would hold whole experts), and send tokens to their
experts in the model's MoE block. Nothing else here or in the learner looks at how a parameter is spread.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from steadyrl.errors import ConfigError


def training_device(name: str) -> torch.device:
    """The device of `trainer.device`: "cpu", "cuda", or "auto" for CUDA where there is one.

    Raises:
        ConfigError: "cuda", and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device = cuda, but torch finds no CUDA device: set trainer.device=auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def shard(root: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Spread a model over the ranks of `mesh`, in place: its decoder layers one by one, the rest together.

    Slices stay in the dtype they have (float32); layers are put together and run in `dtype`, and gradients are summed
    in float32: summed, not averaged, because the counts that a loss divides by are those of all ranks.

    Args:
        root: whose forward pass contains every use of the weights; the same weights on every rank.
        mesh: 1-d, of the device the slices are to be on.
    """
    low = dtype if dtype != torch.float32 else None
    layers = [module for module in root.modules() if isinstance(module, GradientCheckpointingLayer)]
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in reversed(layers):  # the inner one first, should there be a layer in a layer
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # its inputs hold the log-probabilities of the engine, which no dtype may round
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # taken apart after the forward pass, as the layers are: slices may be exchanged for others before the next one
    wrapped = fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    wrapped.set_reduce_scatter_unused_params(True)  # an expert may have a token on one rank only


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over the ranks; all of them have to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(like: Tensor, tensor: Tensor) -> Tensor:
    """What this rank would hold of a whole `tensor` if it were spread as `like` is. No rank hears of another."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return local(tensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()
