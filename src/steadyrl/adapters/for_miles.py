"""An objective inside miles, slime's fork; `for_slime.py` explains, and holds what both share.

    --loss-type custom_loss --custom-loss-function-path steadyrl.adapters.for_miles.policy_loss

The hooks for slime's own loss, `for_slime.correction` and `for_slime.sequence_sum`, fit miles, too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from steadyrl.adapters import common
from steadyrl.adapters.for_slime import ANCHORS, DECIDES, Reducer, loss_of
from steadyrl.adapters.settings import Framework

MILES = Framework("miles", ANCHORS, DECIDES)


def policy_loss(args: Any, batch: dict[str, Any], logits: Tensor, reduce: Reducer) -> tuple[Tensor, dict[str, Tensor]]:
    """miles' contract of --custom-loss-function-path: (sum over samples, metrics). logits: [1, T, V / ranks]."""
    from miles.backends.training_utils import loss as miles  # pyright: ignore[reportMissingImports]

    scored = miles.get_log_probs_and_entropy(
        logits,
        args=args,
        **{name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")},
        with_entropy=args.entropy_coef != 0,
        max_seq_lens=batch.get("max_seq_lens"),
    )
    ranks = common.sum_over(miles.get_parallel_state().intra_dp.group)
    return loss_of(MILES, args, batch, logits, scored, reduce, ranks)
