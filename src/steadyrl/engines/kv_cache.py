"""Surgery on a key-value cache: rows leave, rows join, and padding on the left is cut.

Rows are padded on the left, so that the newest token of each stands in the last column. The padding may hold
anything: the attention mask hides it. Layers are `DynamicLayer`, keys and values [B, heads, W, size], also for
sliding attention, where the mask alone makes the window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from steadyrl.errors import ConfigError


def check_cache(model: PreTrainedModel) -> None:
    """Refuse a model whose state is more than the keys and values of its tokens, such as a recurrent one.

    Raises:
        ConfigError: naming the kind of layer.
    """
    odd = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
    }
    if odd:
        raise ConfigError(
            f"the embedded engine cannot decode {type(model).__name__}: it keeps more than keys and values "
            f"({', '.join(sorted(odd))}). Set model.path to a model with attention layers only"
        )


def merge(first: DynamicCache, second: DynamicCache) -> DynamicCache:
    """One cache with the rows of both, those of `first` in front; the narrower one is padded on the left."""
    merged = DynamicCache()
    for index, (one, other) in enumerate(zip(first.layers, second.layers, strict=True)):
        merged.update(_stacked(one, other, "keys"), _stacked(one, other, "values"), index)
    return merged


def select(cache: DynamicCache, rows: Tensor, first_column: int = 0) -> DynamicCache:
    """A copy of some rows [B'] int64, which may repeat, without the columns before `first_column`."""
    selected = DynamicCache()
    for index, layer in enumerate(cache.layers):
        keys, values = _states(layer, "keys"), _states(layer, "values")
        selected.update(keys[rows, :, first_column:], values[rows, :, first_column:], index)
    return selected


def stack_left_padded(one: Tensor, other: Tensor, dim: int) -> Tensor:
    """Concatenate along dimension 0; the shorter one gets zeros in front along `dim`."""
    width = max(one.shape[dim], other.shape[dim])
    return torch.cat([_left_padded(part, width, dim) for part in (one, other)])


def _stacked(one: object, other: object, name: str) -> Tensor:
    return stack_left_padded(_states(one, name), _states(other, name), dim=2)


def _states(layer: object, name: str) -> Tensor:
    assert isinstance(layer, DynamicLayer)
    states = getattr(layer, name)
    assert isinstance(states, Tensor)
    return states


def _left_padded(part: Tensor, width: int, dim: int) -> Tensor:
    missing = width - part.shape[dim]
    if missing == 0:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part.new_zeros(shape), part], dim=dim)
