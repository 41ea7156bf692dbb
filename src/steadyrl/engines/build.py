"""From a description to an engine."""

from __future__ import annotations

from typing import Literal

import torch

from steadyrl.engines.local_engine import LocalEngine
from steadyrl.models.load import eos_token_ids, load_model, load_tokenizer


def build_local_engine(
    model_path: str,
    dtype: str,
    max_sequences: int,
    records_routing: bool,
    cache_on_update: Literal["keep", "rebuild"] = "keep",
) -> LocalEngine:
    """The embedded engine on a model of its own. Its weights count only after the first broadcast."""
    model = load_model(model_path, getattr(torch, dtype))
    tokenizer = load_tokenizer(model_path)
    return LocalEngine(
        model.requires_grad_(False),
        tokenizer,
        eos_token_ids=eos_token_ids(model, tokenizer),
        max_sequences=max_sequences,
        records_routing=records_routing,
        cache_on_update=cache_on_update,
    )
