"""The sizes of a model that the arithmetic of memory and time needs to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Counts are of numbers, not of bytes."""

    parameters: int
    expert_parameters: int  # of the routed experts, in all layers
    parameter_tensors: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int  # intermediate size of a dense layer, or of one expert
    vocabulary: int
    moe_layers: int  # 0: no mixture of experts
    experts: int
    experts_per_token: int
    positions: int  # the longest sequence, prompt and response together
    largest_layer: int  # parameters of the largest decoder layer

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through: all but the experts that were not chosen."""
        if not self.moe_layers:
            return self.parameters
        return self.parameters - self.expert_parameters * (self.experts - self.experts_per_token) // self.experts

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    @property
    def routed_expert_bytes_per_token(self) -> int:
        """Recorded experts of one token, [L, K] in the smallest unsigned type that can name them all."""
        return self.moe_layers * self.experts_per_token * (1 if self.experts <= 256 else 2)
