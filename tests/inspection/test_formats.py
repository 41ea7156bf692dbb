"""Every format, written from its documented fields, gives what the functions of objective/ give on the same numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from inspection import dumps

from steadyrl.diagnostics.mismatch import mismatch_sums
from steadyrl.inspection import archive
from steadyrl.inspection.rules import select_rules
from steadyrl.inspection.study import Findings, inspect
from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import policy_loss
from steadyrl.objective.rule import Layout
from steadyrl.types import BatchCounts, add_sums, pooled

WRITERS = {
    "own": dumps.write_own,
    "parquet": dumps.write_parquet,
    "prime-rl": dumps.write_prime_rl,
    "nemo-rl": dumps.write_nemo_rl,
    "slime": dumps.write_slime,
    "miles": dumps.write_miles,
}
OWN = ("own", "parquet")
SHARES = ("outside_band", "clip_low", "clip_high")
RULES = [
    "dapo",
    "gspo-published",
    "dppo-tv",
    "dppo-kl",
    "dppo-sat-paper",
    "cispo",
    "m2po",
    "seqclip",
    "opsm",
    "sat-gspo",
]


@pytest.fixture(scope="module")
def run():
    return dumps.make_run(drift=0.15)  # q of SAT is below log 1.2, and the plain clip cuts some


@pytest.fixture(scope="module", params=WRITERS)
def written(request, run, tmp_path_factory):
    return request.param, WRITERS[request.param](tmp_path_factory.mktemp("dump"), run)


@pytest.fixture(scope="module")
def findings(written):
    """In blocks of 100 tokens: a step of 300 takes several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive, "BLOCK_TOKENS", 100)
        return inspect([written[1]], RULES)


def flat(batch):
    """The active tokens of one step as objective/ takes them."""
    active = [np.flatnonzero(one.loss_mask) for one in batch]

    def field(name):
        parts = [np.asarray(getattr(one, name), np.float32)[at] for one, at in zip(batch, active, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    sizes = [len(at) for at in active]
    sequence = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(sizes))
    advantage = torch.tensor([one.advantage for one in batch])[sequence]
    layout = Layout(torch.ones(len(sequence), dtype=torch.bool), sequence, len(batch))
    return field("trainer_logp"), field("behavior_logp"), field("old_logp"), advantage, layout


def expected(run, preset, kind="objective"):
    """Pooled statistics of the preset, each optimizer step in one call and with its own threshold."""
    objective = ObjectiveConfig.model_validate({"preset": preset, "kl_coef": 0.0})
    total = {}
    for step in sorted({one.step for one in run}):
        logp, behavior, old, advantage, layout = flat([one for one in run if one.step == step])
        output = policy_loss(
            objective,
            logp=logp,
            behavior_logp=behavior,
            advantage=advantage,
            layout=layout,
            counts=BatchCounts(len(logp), layout.num_sequences),
            old_logp=old,
        )
        add_sums(total, output.sums)
    return pooled(total)


def totals_of(findings: Findings, preset: str):
    (found,) = [totals for totals in findings.rules if preset in totals.rule.presets]
    return found


def test_d_bar_and_divergences(findings, run):
    total = {}
    for step in sorted({one.step for one in run}):
        logp, behavior, _, _, layout = flat([one for one in run if one.step == step])
        add_sums(total, mismatch_sums(logp, behavior, layout.loss_mask))
    means = pooled(total)
    assert means["mismatch/d_bar"] > 0.05
    for name in ("d_bar", "k3", "weight_token", "tail_0.1"):
        assert findings.means[f"mismatch/{name}"] == pytest.approx(means[f"mismatch/{name}"], rel=1e-12)


@pytest.mark.parametrize("preset", ["grpo", "gspo", *RULES])
def test_clip_fractions(findings, run, preset):
    oracle, found = expected(run, preset), totals_of(findings, preset).means()
    for name in SHARES:
        assert found[f"objective/{name}"] == pytest.approx(oracle[f"objective/{name}"], abs=1e-12), name
    for name in (name for name in oracle if name.startswith("rejection/")):
        assert found[name] == pytest.approx(oracle[name], abs=1e-12)


@pytest.mark.parametrize("preset", ["sat-grpo", "sat-gspo"])
def test_gate_and_intervention_rate(findings, run, preset):
    oracle, found = expected(run, preset), totals_of(findings, preset).means()
    assert oracle["sat/gate_rate"] > 0.03
    for name in ("gate_rate", "intervention_rate", "q", "radius_low", "radius_high"):
        assert found[f"sat/{name}"] == pytest.approx(oracle[f"sat/{name}"], rel=1e-9), name


def test_sat_by_hand(findings, run):
    """Gate rate and what it removes from the clip of PPO, from the equations, in numpy."""
    gated = removed = clipped = tokens = 0
    for step in sorted({one.step for one in run}):
        logp, behavior, _, advantage, _ = (
            part.numpy() if isinstance(part, torch.Tensor) else part
            for part in flat([one for one in run if one.step == step])
        )
        d = logp - behavior
        q = np.sort(np.abs(d))[math.ceil(0.9 * len(d)) - 1]
        gate = np.abs(d) > q
        radius = np.where(gate, 0.2 / (1 + (np.abs(d) / q) ** 2), 0.2)
        plain = ((d > 0) & (np.exp(d) > 1.2) & (advantage > 0)) | ((d < 0) & (np.exp(d) < 0.8) & (advantage < 0))
        narrow = ((np.exp(d) > 1 + radius) & (advantage > 0)) | ((np.exp(d) < 1 - radius) & (advantage < 0))
        gated, removed, clipped = gated + gate.sum(), removed + (narrow & ~plain).sum(), clipped + plain.sum()
        tokens += len(d)
    assert removed > 0
    assert clipped > 0
    sat, grpo = totals_of(findings, "sat-grpo").means(), totals_of(findings, "grpo").means()
    assert sat["sat/gate_rate"] == pytest.approx(gated / tokens)
    assert sat["sat/intervention_rate"] == pytest.approx(removed / tokens)
    assert grpo["inspect/no_gradient"] == pytest.approx(clipped / tokens)
    assert sat["inspect/no_gradient"] == pytest.approx((clipped + removed) / tokens)


def test_signal_and_gradient_by_hand(findings, run):
    """Shares of |A|: what grpo removes, and r |A| of what it keeps; the loss divides each step by its tokens."""
    cut = whole = kept = plain = 0.0
    for step in sorted({one.step for one in run}):
        batch = [one for one in run if one.step == step]
        tokens = sum(sum(one.loss_mask) for one in batch)
        for one in batch:
            active = np.asarray(one.loss_mask, bool)
            d = np.asarray(one.trainer_logp, np.float64)[active] - np.asarray(one.behavior_logp)[active]
            lost = (np.exp(d) > 1.2) if one.advantage > 0 else (np.exp(d) < 0.8)
            cut += abs(one.advantage) * lost.sum()
            whole += abs(one.advantage) * len(d)
            kept += abs(one.advantage) * np.exp(d)[~lost].sum() / tokens
            plain += abs(one.advantage) * len(d) / tokens
    found = totals_of(findings, "grpo").means()
    assert found["inspect/signal_cut"] == pytest.approx(cut / whole, rel=1e-6)
    assert found["inspect/gradient_kept"] == pytest.approx(kept / plain, rel=1e-5)


def test_steps_and_counts(findings, run):
    assert [row.step for row in findings.steps] == ["0", "1", "2"]
    assert [row.responses for row in findings.steps] == [12, 12, 12]
    assert findings.evidence.active == sum(sum(one.loss_mask) for one in run)
    assert findings.evidence.rewards == (sum(one.reward for one in run), len(run))


def test_lag_is_known_where_the_format_has_it(findings, written, run):
    counted: dict[int, int] = {}
    for one in run:
        age = one.step - max(one.versions)
        counted[age] = counted.get(age, 0) + sum(one.loss_mask)
    assert dict(findings.evidence.ages) == (counted if written[0] in OWN else {})
    if written[0] == "slime":  # the older of two calls of the engine
        assert findings.evidence.version_spans[("step", 2)] == (0, 2)


def test_split_and_corrections_where_old_logp_is(findings, written, run):
    assert ("split/engine_d_bar" in findings.means) == (written[0] in OWN)
    if written[0] in OWN:
        engine = [
            np.abs(np.float32(one.old_logp) - np.float32(one.behavior_logp))[np.asarray(one.loss_mask, bool)]
            for one in run
        ]
        assert findings.means["split/engine_d_bar"] == pytest.approx(np.concatenate(engine).mean(), rel=1e-4)


def test_all_presets_are_answered_or_refused_with_a_reason(run, tmp_path):
    from steadyrl.presets import PRESETS

    found = inspect([dumps.write_own(tmp_path, run)])
    answered = {name for totals in found.rules for name in totals.rule.presets}
    assert answered | set(found.refused) == set(PRESETS)
    assert not answered & set(found.refused)
    assert all(totals.steps == 3 for totals in found.rules)
    for preset in ("grpo-tis", "icepop", "mis", "geo-rs", "decoupled-ppo"):
        oracle, means = expected(run, preset), totals_of(found, preset).means()
        for name in oracle:
            assert means[name] == pytest.approx(oracle[name], rel=1e-9, abs=1e-12), (preset, name)
    assert "micro-batches" in found.refused["sat-grpo-microbatch"]
    assert "likeliest tokens" in found.refused["dppo-topk-tv"]


def test_presets_that_differ_in_the_aggregation_are_one_rule():
    rules, _ = select_rules()
    assert [rule.presets for rule in rules if "grpo" in rule.presets] == [("grpo", "dr-grpo")]
