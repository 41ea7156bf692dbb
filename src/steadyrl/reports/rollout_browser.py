"""The recorded rollouts of a page: which of them it holds, and what it says about each token.

The page holds plain JSON; `rollouts.js` draws it. Its size is bounded whatever the runs recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from steadyrl.reports.clip_rules import Rule, Verdict, can_judge, is_finite, judge, rules_of
from steadyrl.reports.recorded import batch_id, readable_batches
from steadyrl.reports.recorder import Row, RunData, read_rollouts

BATCHES = 4  # of a run
ROLLOUTS = 48  # of a batch
CHARACTERS = 1_000_000  # of a page; every batch gets an equal part, and shows at least one rollout
TOKENS_EACH = 1_500  # of one rollout
LONGEST_TEXT = 2_000  # characters of a prompt, or of a response without tokens
LONGEST_TOKEN = 40  # characters
SCALE_QUANTILE = 0.99  # of |d| in a batch; its colour is the strongest

NO_TOKENS = "This run folder does not hold the text of single tokens: an older version recorded it."
NOT_TRAINED = "These rollouts were recorded without the trainer's log-probabilities, so there is nothing to colour by."


def browser_data(runs: Sequence[RunData]) -> dict[str, Any] | None:
    """What the page embeds; None if no run recorded rollouts."""
    chosen = [(run, readable_batches(run, BATCHES)) for run in runs]
    num_batches = sum(len(files) for _, files in chosen)
    if num_batches == 0:
        return None
    budget = CHARACTERS // num_batches
    data = []
    for run, files in chosen:
        rules = rules_of(run.config)
        batches = [_batch(batch_id(file), read_rollouts(file), rules, budget) for file in files]
        described = [{"name": rule.name, "about": rule.about} for rule in rules]
        data.append({"name": run.name, "rules": described, "batches": batches})
    return {"runs": data}


def script_json(data: Any) -> str:
    """JSON that may stand inside a <script> element: no `<`, `>` or `&`, whatever a model wrote."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: no line separators, no half characters
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _batch(number: int, rollouts: list[Row], rules: Sequence[Rule], budget: int) -> dict[str, Any]:
    needs_old_logp = any(rule.objective.needs_old_logp for rule in rules)
    judged = [index for index, rollout in enumerate(rollouts) if can_judge(rollout, needs_old_logp)]
    # over the whole batch, because the quantile of SAT belongs to it; then only what is shown is kept
    verdicts = [judge(rule.objective, [rollouts[index] for index in judged]) for rule in rules] if judged else []
    verdicts_of = dict(zip(judged, zip(*verdicts, strict=True), strict=True)) if verdicts else {}
    rows, spent = [], 0
    for index, rollout in enumerate(rollouts[:ROLLOUTS]):
        row = _rollout(rollout, verdicts_of.get(index, ()))
        spent += len(script_json(row))
        if rows and spent > budget:
            break
        rows.append(row)
    sizes = sorted(abs(d) for index in judged for d in _drifts(rollouts[index]) if d is not None)
    return {
        "title": f"batch {number}",
        "total": len(rollouts),
        "note": _note(rollouts, judged),
        "scale": sizes[math.ceil(SCALE_QUANTILE * len(sizes)) - 1] if sizes else None,
        "rollouts": rows,
    }


def _rollout(rollout: Row, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    text, mask = rollout["text"], rollout["loss_mask"]
    row: dict[str, Any] = {
        "prompt": str(rollout.get("prompt_text", ""))[:LONGEST_TEXT],
        "id": rollout["prompt_id"][:LONGEST_TEXT],
        "reward": rollout["reward"],
        "status": rollout["status"][:LONGEST_TEXT],
        "advantage": _rounded(rollout.get("advantage")),
        "size": sum(mask),
        "text": text[:LONGEST_TEXT],
        "more": max(0, len(text) - LONGEST_TEXT),
    }
    if not _has_tokens(rollout):
        return row
    # between two sampled stretches stand the tokens of a tool or of another turn: they are shown, without numbers
    first = mask.index(1) if 1 in mask else len(mask)
    shown = slice(first, first + TOKENS_EACH)
    version = rollout.get("train_version")
    row |= {
        "text": "",
        "more": max(0, len(mask) - first - TOKENS_EACH),
        "tokens": [token[:LONGEST_TOKEN] for token in rollout["token_texts"][shown]],
        "d": [_rounded(d) for d in _drifts(rollout)[shown]],
        "mu": [
            _rounded(math.exp(min(logp, 0.0))) if sampled and is_finite(logp) else None
            for sampled, logp in zip(mask[shown], rollout["behavior_logp"][shown], strict=True)
        ],
        "lag": [
            version - sampled_by if sampled and is_finite(version) and is_finite(sampled_by) else None
            for sampled, sampled_by in zip(mask[shown], rollout["versions"][shown], strict=True)
        ],
    }
    if verdicts:
        row["codes"] = [verdict.letters[shown] for verdict in verdicts]
        row["q"] = [_rounded(verdict.q) for verdict in verdicts]
    return row


def _note(rollouts: Sequence[Row], judged: Sequence[int]) -> str:
    """Why there are no colours, or not on all rollouts; empty where there are."""
    if not all(map(_has_tokens, rollouts)):
        return NO_TOKENS
    if not judged:
        return NOT_TRAINED
    without = len(rollouts) - len(judged)
    return f"{without} of {len(rollouts)} rollouts were not trained on." if without else ""


def _has_tokens(rollout: Row) -> bool:
    """Whether what is drawn per token is there, one entry each."""
    size = len(rollout["loss_mask"])
    rows = [rollout.get(name) for name in ("token_texts", "behavior_logp", "versions")]
    if not all(isinstance(row, list) and len(row) == size for row in rows):
        return False
    return all(isinstance(token, str) for token in rollout["token_texts"])


def _drifts(rollout: Row) -> list[float | None]:
    """d = trainer_logp - behavior_logp on sampled tokens, None elsewhere and where the trainer gave no number."""
    size = len(rollout["loss_mask"])
    trainer = rollout.get("trainer_logp")
    if not isinstance(trainer, list) or len(trainer) != size:
        return [None] * size
    return [
        current - behavior if sampled and is_finite(current) and is_finite(behavior) else None
        for sampled, current, behavior in zip(rollout["loss_mask"], trainer, rollout["behavior_logp"], strict=True)
    ]


def _rounded(value: Any) -> float | None:
    return float(f"{value:.4g}") if is_finite(value) else None
