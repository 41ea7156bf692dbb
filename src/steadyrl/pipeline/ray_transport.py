"""What travels through the object store: rollouts, micro-batches and weights as numpy arrays. Pure; does not need Ray.

Numpy arrays travel as they lie in memory, tensors do not. Integers are narrowed to the smallest type that holds them,
and come back in the type they had: the experts of a micro-batch take 1 byte where the trainer uses 8, and so do the
versions. Arrays of many rollouts are laid end to end, so that what is said about each of them is small.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.types import Rollout, TrainBatch

NARROW = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32)


def narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in the smallest integer type that holds all of them; anything but integers as it is."""
    if array.dtype.kind not in "iu" or not array.size:
        return array
    low, high = int(array.min()), int(array.max())
    for narrow in NARROW:
        if np.iinfo(narrow).min <= low and high <= np.iinfo(narrow).max:
            return array.astype(narrow, copy=False)
    return array


@dataclass(frozen=True)
class PackedRollouts:
    """A list of rollouts."""

    arrays: dict[str, NDArray[Any]]  # of a field: those of all the rollouts end to end, [sum of lengths, ...]
    lengths: dict[str, NDArray[np.int32]]  # of a field: of each rollout; -1 = it is None
    dtypes: dict[str, str]  # of a field: a character for each rollout, see numpy.dtype.char
    others: dict[str, list[Any]]  # fields that are no arrays

    @property
    def num_bytes(self) -> int:
        """Of arrays and texts."""
        arrays = sum(array.nbytes for array in [*self.arrays.values(), *self.lengths.values()])
        texts = {text for values in self.others.values() for text in values if isinstance(text, str)}
        return arrays + sum(len(text.encode()) for text in texts) + sum(map(len, self.dtypes.values()))


def pack_rollouts(rollouts: Sequence[Rollout]) -> PackedRollouts:
    """Rollouts as they come from an engine: not trained on yet."""
    packed = PackedRollouts({}, {}, {}, {})
    for field in dataclasses.fields(Rollout):
        values = [getattr(rollout, field.name) for rollout in rollouts]
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if not arrays:
            packed.others[field.name] = values
            continue
        packed.arrays[field.name] = narrowed(np.concatenate(arrays))
        lengths = [-1 if value is None else len(value) for value in values]
        packed.lengths[field.name] = np.asarray(lengths, np.int32)
        packed.dtypes[field.name] = "".join(" " if value is None else value.dtype.char for value in values)
    return packed


def unpack_rollouts(packed: PackedRollouts) -> list[Rollout]:
    """The rollouts, to the last bit, in memory of their own."""
    fields: dict[str, list[Any]] = dict(packed.others)
    for name, array in packed.arrays.items():
        fields[name], start = [], 0
        for length, dtype in zip(packed.lengths[name].tolist(), packed.dtypes[name], strict=True):
            fields[name].append(None if length < 0 else array[start : start + length].astype(dtype))
            start += max(0, length)
    rows = zip(*fields.values(), strict=True)
    return [Rollout(**dict(zip(fields, row, strict=True))) for row in rows]


@dataclass(frozen=True)
class PackedTensor:
    values: NDArray[Any]
    dtype: str  # of numpy


def pack_tensor(tensor: Tensor) -> PackedTensor:
    array = tensor.detach().cpu().numpy()
    return PackedTensor(narrowed(array), array.dtype.str)


def unpack_tensor(packed: PackedTensor) -> Tensor:
    return torch.from_numpy(packed.values.astype(packed.dtype))


def pack_batch(batch: TrainBatch) -> dict[str, Any]:
    """A micro-batch, field by field."""
    return {field.name: _each(pack_tensor, Tensor, getattr(batch, field.name)) for field in dataclasses.fields(batch)}


def unpack_batch(packed: Mapping[str, Any]) -> TrainBatch:
    fields: dict[str, Any] = {name: _each(unpack_tensor, PackedTensor, value) for name, value in packed.items()}
    return TrainBatch(**fields)


def _each(change: Any, kind: type, value: Any) -> Any:
    """`change` applied to a value, or to each in a list, of this kind; anything else as it is."""
    if isinstance(value, list):
        return [_each(change, kind, one) for one in value]
    return change(value) if isinstance(value, kind) else value


def num_bytes(packed: Any) -> int:
    """Bytes of all the arrays in a packed micro-batch, or a list of them."""
    if isinstance(packed, PackedTensor):
        return packed.values.nbytes
    if isinstance(packed, Mapping):
        return sum(num_bytes(value) for value in packed.values())
    return sum(num_bytes(value) for value in packed) if isinstance(packed, list) else 0


@dataclass(frozen=True)
class PackedWeights:
    bits: dict[str, NDArray[Any]]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.bits.values())


def pack_weights(weights: Mapping[str, Tensor], dtype: torch.dtype) -> PackedWeights:
    """Weights rounded to a dtype; without a copy where they have it and lie in the memory of the CPU."""
    cast = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    if dtype == torch.bfloat16:  # unknown to numpy
        return PackedWeights({name: tensor.view(torch.int16).numpy() for name, tensor in cast.items()}, dtype)
    return PackedWeights({name: tensor.numpy() for name, tensor in cast.items()}, dtype)


def unpack_weights(packed: PackedWeights) -> dict[str, Tensor]:
    """The weights, for reading only: they stay where they are, which may be the object store."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(array).view(packed.dtype) for name, array in packed.bits.items()}
