"""Objectives by name: each entry is the `[objective]` table of a recipe.

`grpo` and `gspo` are the published objectives with the radii of the staleness study (0.2 / 0.2);
`sat-` adds the Staleness-Adaptive Trust Region (quantile 0.90, Hill kernel of exponent 2).
"""

from typing import Any

CLIP: dict[str, Any] = {"rule": "clip", "low": 0.2, "high": 0.2}
SAT: dict[str, Any] = {"rule": "sat", "low": 0.2, "high": 0.2, "alpha": 0.9, "exponent": 2.0}

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"unit": "token", "boundary": CLIP, "aggregation": "token_mean"},
    "gspo": {"unit": "sequence", "boundary": CLIP, "aggregation": "sequence_mean"},
    "sat-grpo": {"unit": "token", "boundary": SAT, "aggregation": "token_mean"},
    "sat-gspo": {"unit": "sequence", "boundary": SAT, "aggregation": "sequence_mean"},
}
