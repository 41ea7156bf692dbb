"""Small models and rates that the planning tests share."""

from __future__ import annotations

from typing import Any

from steadyrl.planning.lengths import Lengths, StatedLengths
from steadyrl.planning.model_shape import ModelShape
from steadyrl.planning.rates import Rates, Speed

FIXED = StatedLengths(shape="fixed", mean=10, prompt=5)
VARIED = StatedLengths(shape="lognormal", mean=12, spread=0.8, prompt=5)

SHAPE = ModelShape(
    parameters=1_000,
    expert_parameters=0,
    parameter_tensors=10,
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    mlp_width=16,
    vocabulary=32,
    moe_layers=0,
    experts=0,
    experts_per_token=0,
    positions=64,
    largest_layer=100,
)

RATES = {
    "decode_step_s": 0.01,
    "decode_sequence_s": 0.001,
    "prefill_token_s": 0.0,
    "train_step_s": 0.2,
    "train_tokens_per_s": 1_000.0,
    "broadcast_bytes_per_s": 50_000.0,  # of 2,000 bytes: 0.04 s
    "load_bytes_per_s": 20_000.0,  # 0.1 s
    "grade_response_s": 0.002,
    "transfer_response_s": 0.0005,
    "step_other_s": 0.03,
    "record_batch_s": 0.0,
    "checkpoint_bytes_per_s": 1e6,
}


def speed(lengths: Lengths = FIXED, **rates: Any) -> Speed:
    """Speeds of the test model, with some rates changed."""
    return Speed(Rates(**{**RATES, **rates}), lengths, None, frozenset(), "made up", evaluation_prompts=30)
