"""Layouts, shares, thresholds across calls and ranks, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from adapters.padded import difference, direct, make_padded, threshold_of

from steadyrl.adapters import common, settings
from steadyrl.adapters.common import RecentScores, from_flat, from_padded, from_responses, joined, objective_loss
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig
from steadyrl.presets import PRESETS

HOST = settings.Framework(
    "host", {"rollout": "engine", "old_actor": "old", "step_start": "start"}, {"aggregation": "--mean"}
)
NO_ENGINE = settings.Framework("bare", {"step_start": "old"}, {}, has_behavior=False)
NEED_MORE = {"dppo-topk-tv", "dppo-topk-kl", "trpo", "sat-grpo-ema", "a3po", "sat-grpo-lag", "sat-gspo-lag"}
USABLE = [name for name in PRESETS if name not in NEED_MORE]  # the others are in test_what_is_refused


def tokens_of(batch, **changes):
    columns = {
        "logp": batch.logp,
        "advantage": batch.advantage,
        "share": torch.tensor(1 / batch.counts.num_tokens),
        "behavior_logp": batch.behavior,
        "old_logp": batch.old,
        "reference_logp": batch.reference,
    }
    return from_padded(batch.mask, **{**columns, **changes})


@pytest.mark.parametrize("preset", USABLE)
def test_every_preset_with_the_shares_of_a_token_mean_is_policy_loss(preset):
    batch = make_padded(drift=0.01 if preset in ("seqclip", "geo-rs") else 0.1).leaf()
    table = {"preset": preset, "aggregation": "token_mean"}
    outcome = objective_loss(ObjectiveConfig.model_validate(table), tokens_of(batch))
    expected, gradient = direct(table, batch)
    assert gradient.abs().max() > 0
    assert float(outcome.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert difference(torch.autograd.grad(outcome.loss, batch.logp)[0], gradient) < 1e-6


@pytest.mark.parametrize("preset", ["grpo", "sat-grpo", "sat-gspo", "ipo", "grpo-product", "gspo-tis"])
def test_response_shares_and_a_kl_penalty_are_those_of_policy_loss(preset):
    batch = make_padded().leaf()
    share = common.per_response(batch.mask) / batch.rows
    objective = ObjectiveConfig.model_validate(preset)
    outcome = objective_loss(objective, tokens_of(batch, share=share), kl_coef=0.3)
    expected, gradient = direct({"preset": preset, "aggregation": "sequence_mean", "kl_coef": 0.3}, batch)
    assert float(outcome.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert difference(torch.autograd.grad(outcome.loss, batch.logp)[0], gradient) < 1e-6


@pytest.mark.parametrize("preset", ["grpo", "gspo-token", "sat-grpo", "spo", "sapo", "dppo-tv", "vespo", "cispo"])
def test_a_weight_per_token_multiplies_every_term(preset):
    """The oracle is autograd: w_t times the term of token t, term by term."""
    batch = make_padded().leaf()
    weight = torch.rand(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2
    objective = ObjectiveConfig.model_validate(preset)
    if objective.unit == "product":
        weight = batch.spread(weight[:, 0])
    outcome = objective_loss(objective, tokens_of(batch, share=torch.tensor(1.0), weight=weight))
    found = torch.autograd.grad(outcome.loss, batch.logp)[0]
    plain = objective_loss(objective, tokens_of(batch, share=torch.tensor(1.0)))
    assert difference(found, torch.autograd.grad(plain.loss, batch.logp)[0] * weight) < 1e-6


def test_token_weights_on_a_sequence_ratio_are_the_weighted_sum_of_its_terms():
    """GSPO by hand: sum_t w_t min(rho A, clip(rho) A), differentiated through rho."""
    batch = make_padded(drift=0.3).leaf()
    weight = torch.rand(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2
    objective = ObjectiveConfig.model_validate({"preset": "gspo", "boundary": {"low": 0.1, "high": 0.1}})
    outcome = objective_loss(objective, tokens_of(batch, share=torch.tensor(1.0), weight=weight))
    mean = ((batch.logp - batch.behavior) * batch.mask).sum(1) / batch.mask.sum(1)
    rho, advantage = mean.exp(), batch.advantage
    surrogate = torch.minimum(rho * advantage, rho.clamp(0.9, 1.1) * advantage)
    expected = -(surrogate[:, None] * weight * batch.mask).sum()
    assert float(outcome.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-9)
    gradient = torch.autograd.grad(expected, batch.logp, retain_graph=True)[0]
    assert difference(torch.autograd.grad(outcome.loss, batch.logp)[0], gradient) < 1e-9


def test_padded_flat_and_listed_responses_are_the_same_tokens():
    batch = make_padded().leaf()
    objective = ObjectiveConfig.model_validate("sat-gspo")
    share = torch.tensor(1 / batch.counts.num_tokens)
    padded = objective_loss(objective, tokens_of(batch))
    masks = batch.split(batch.mask)
    columns = {"logp": batch.logp, "advantage": batch.spread(batch.advantage), "behavior_logp": batch.behavior}
    listed = from_responses(
        masks, **{n: batch.split(v) for n, v in columns.items()}, share=[share.expand(len(m)) for m in masks]
    )
    flat = from_flat(
        torch.cat(masks),
        [len(m) for m in masks],
        share=share,
        **{name: torch.cat(batch.split(values)) for name, values in columns.items()},
    )
    for tokens in (listed, flat):
        outcome = objective_loss(objective, tokens)
        assert float(outcome.loss.detach()) == pytest.approx(float(padded.loss.detach()), rel=1e-12)
        for name, value in common.means(outcome).items():
            assert value == pytest.approx(common.means(padded)[name], rel=1e-9), name


def test_left_padding_is_as_good_as_right_padding():
    batch = make_padded().leaf()
    mirrored = {n: getattr(batch, n).flip(1) for n in ("logp", "behavior", "old")}
    objective = ObjectiveConfig.model_validate("sat-gspo")
    right = objective_loss(objective, tokens_of(batch))
    left = objective_loss(
        objective,
        from_padded(
            batch.mask.flip(1),
            logp=mirrored["logp"],
            advantage=batch.advantage,
            share=torch.tensor(1 / batch.counts.num_tokens),
            behavior_logp=mirrored["behavior"],
        ),
    )
    assert float(left.loss.detach()) == pytest.approx(float(right.loss.detach()), rel=1e-12)


def test_shares_are_the_weights_of_a_linear_reduction():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    shares = common.shares_of(lambda x: ((x * mask).sum(1) / mask.sum(1)).mean(), mask)
    assert shares.tolist() == [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]
    assert common.per_response(mask).tolist() == [[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]]
    with torch.no_grad():  # also inside a scoring pass
        assert common.shares_of(lambda x: x.mean(), torch.zeros(4)).tolist() == [0.25] * 4


@pytest.mark.parametrize("preset", ["sat-grpo", "sat-gspo", "sat-gspo-response", "m2po"])
def test_joined_calls_have_the_threshold_of_the_batch(preset):
    batch = make_padded(rows=8)
    objective = ObjectiveConfig.model_validate(preset)
    halves = [
        from_padded(
            batch.mask[rows],
            logp=batch.logp[rows],
            advantage=batch.advantage[rows],
            share=torch.tensor(1.0),
            behavior_logp=batch.behavior[rows],
        )
        for rows in (slice(0, 3), slice(3, 8))
    ]
    found = common.threshold_across(objective, joined(halves))
    assert found is not None
    assert float(found) == float(threshold_of({"preset": preset}, batch))


@pytest.mark.parametrize("short", [0, 1])  # a window that ends inside a response holds all of it
@pytest.mark.parametrize("preset", ["sat-grpo", "sat-gspo", "sat-gspo-response", "m2po"])
def test_recent_scores_give_the_threshold_of_the_last_responses(preset, short):
    batch = make_padded(rows=8)
    objective = ObjectiveConfig.model_validate(preset)
    recent = RecentScores(num_tokens=int(batch.mask[4:].sum()) - short)  # the last four responses
    found = None
    for row in range(8):
        part = slice(row, row + 1)
        tokens = from_padded(
            batch.mask[part],
            logp=batch.logp[part],
            advantage=batch.advantage[part],
            share=torch.tensor(1.0),
            behavior_logp=batch.behavior[part],
        )
        found = recent.threshold(objective, tokens)
    last = make_padded(rows=8)
    last = type(last)(*(getattr(last, name)[4:] for name in last.__dataclass_fields__))
    assert found is not None
    assert float(found) == float(threshold_of({"preset": preset}, last))
    assert RecentScores(10).threshold(ObjectiveConfig.model_validate("grpo"), tokens) is None


def test_a_call_without_an_active_token_is_a_loss_of_zero():
    batch = make_padded(rows=2).leaf()
    tokens = from_padded(
        torch.zeros_like(batch.mask),
        logp=batch.logp,
        advantage=batch.advantage,
        share=common.shares_of(lambda x: (x * 0).sum(), batch.logp),
        behavior_logp=batch.behavior,
    )
    for preset in ("sat-gspo", "ipo", "m2po"):
        objective = ObjectiveConfig.model_validate(preset)
        outcome = objective_loss(objective, tokens, threshold=RecentScores(5).threshold(objective, tokens))
        assert float(outcome.loss.detach()) == 0
        assert torch.autograd.grad(outcome.loss, batch.logp)[0].abs().max() == 0
        assert all(value == 0 or name == "sat/min_contraction" for name, value in common.means(outcome).items())


def test_masked_places_may_hold_anything():
    batch = make_padded().leaf()
    expected = objective_loss(ObjectiveConfig.model_validate("ipo"), tokens_of(batch), kl_coef=0.1)
    wild = {
        name: torch.where(batch.mask, getattr(batch, field), torch.nan)
        for name, field in (("logp", "logp"), ("behavior_logp", "behavior"), ("reference_logp", "reference"))
    }
    share = torch.where(batch.mask, 1 / batch.counts.num_tokens, torch.nan)
    outcome = objective_loss(ObjectiveConfig.model_validate("ipo"), tokens_of(batch, **wild, share=share), kl_coef=0.1)
    assert float(outcome.loss.detach()) == float(expected.loss.detach())
    assert torch.isfinite(torch.autograd.grad(outcome.loss, batch.logp)[0]).all()


def test_the_diagnostics_of_sat_are_reported():
    batch = make_padded(drift=0.3)
    found = common.means(objective_loss(ObjectiveConfig.model_validate("sat-grpo"), tokens_of(batch)), "actor/")
    d = (batch.logp - batch.behavior)[batch.mask].abs()
    q = d.sort().values[-(-9 * len(d) // 10) - 1]
    assert found["actor/sat/q"] == pytest.approx(float(q))
    assert found["actor/sat/gate_rate"] == pytest.approx(float((d > q).double().mean()))
    assert found["actor/mismatch/d_bar"] == pytest.approx(float(d.mean()))
    assert found["actor/sat/min_contraction"] == pytest.approx(float(1 / (1 + (d.max() / q) ** 2)))
    assert set(found) >= {f"actor/sat/{name}" for name in ("radius_low", "radius_high", "intervention_rate")}


# ---- ranks ----


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    batch = make_padded(rows=8)
    rows = slice(0, 3) if rank == 0 else slice(3, 8)
    tokens = from_padded(
        batch.mask[rows],
        logp=batch.logp[rows],
        advantage=batch.advantage[rows],
        share=torch.tensor(1 / batch.counts.num_tokens),
        behavior_logp=batch.behavior[rows],
    )
    found = {}
    for preset in ("sat-grpo", "sat-gspo-response", "m2po", "sat-grpo-microbatch"):
        outcome = objective_loss(ObjectiveConfig.model_validate(preset), tokens, all_reduce=common.sum_over())
        found[preset] = (float(outcome.loss.detach()), common.means(outcome, all_reduce=common.sum_over()))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_share_the_quantile(tmp_path):
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    batch = make_padded(rows=8)
    for preset in ("sat-grpo", "sat-gspo-response", "m2po"):
        table = {"preset": preset, "aggregation": "token_mean"}
        expected, _ = direct(table, batch, threshold=threshold_of(table, batch))
        assert sum(found[preset][0] for found in ranks) == pytest.approx(float(expected), rel=1e-6)
        assert ranks[0][preset][1]["mismatch/d_bar"] == ranks[1][preset][1]["mismatch/d_bar"]
    # the paper's micro-batch scope asks nobody
    assert ranks[0]["sat-grpo-microbatch"][1]["sat/q"] != ranks[0]["sat-grpo"][1]["sat/q"]
    assert common.sum_over() is None  # without a process group


# ---- settings ----


def test_an_objective_is_a_name_or_a_table():
    assert settings.objective_for(HOST, "sat-gspo").boundary.rule == "sat"
    chosen = settings.objective_for(HOST, {"preset": "sat-grpo", "boundary": {"alpha": 0.8}})
    assert chosen.boundary.alpha == 0.8
    assert chosen.unit == "token"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_usable_or_refused_in_one_sentence(preset):
    if preset in USABLE:
        assert settings.objective_for(HOST, preset).preset == preset
    else:
        with pytest.raises(ConfigError, match="host"):
            settings.objective_for(HOST, preset)


@pytest.mark.parametrize(
    ("framework", "table", "steps", "message"),
    [
        (HOST, "sat-gsop", None, "did you mean 'sat-gspo'"),
        (HOST, {"preset": "grpo", "boundry": {}}, None, "Extra inputs"),
        (HOST, {"preset": "grpo", "aggregation": "token_mean"}, None, "leave it out and set --mean"),
        (HOST, {"preset": "grpo", "anchor": "step_start"}, 1, "every ratio is 1"),
        (HOST, {"preset": "grpo", "anchor": "step_start"}, None, "tell steps_per_batch"),
        (HOST, "a3po", None, "no log-probabilities for anchor = 'prox_approx'"),
        (HOST, "trpo", None, "needs distributions"),
        (HOST, "dppo-topk-kl", None, "needs distributions"),
        (HOST, "sat-gspo-lag", None, "set boundary.quantile_scope to batch"),
        (HOST, "sat-grpo-ema", None, "set boundary.quantile_scope to batch or microbatch"),
        (NO_ENGINE, {"preset": "grpo-tis", "anchor": "step_start"}, 2, "use those of bare"),
        (NO_ENGINE, {"preset": "geo-rs", "anchor": "step_start"}, 2, "use those of bare"),
        (NO_ENGINE, "sat-gspo", None, "set anchor = 'step_start' \\(old\\)"),
    ],
)
def test_what_is_refused(framework, table, steps, message):
    with pytest.raises(ConfigError, match=message):
        settings.objective_for(framework, table, steps)


def test_several_steps_per_batch_admit_the_anchor_before_them():
    assert settings.objective_for(HOST, {"preset": "sat-grpo", "anchor": "step_start"}, 2).anchor == "step_start"


def test_a_second_importance_weight_is_refused():
    with pytest.raises(ConfigError, match="count the mismatch twice: set x=0"):
        settings.refuse_second_weight(HOST, settings.objective_for(HOST, "sat-gspo"), "set x=0")
    with pytest.raises(ConfigError, match="applied twice: set x=0, or leave out the correction"):
        settings.refuse_second_weight(HOST, settings.objective_for(HOST, "icepop"), "set x=0")
    once = settings.objective_for(HOST, {"preset": "sat-grpo", "anchor": "old_actor"})
    assert settings.refuse_second_weight(HOST, once, "set x=0") is None


def test_settings_of_the_replaced_loss_are_refused():
    class Given:
        delta = 3.0

    with pytest.raises(ConfigError, match="set delta=None"):
        settings.refuse_without_effect(HOST, Given, {"delta": None})
    assert settings.refuse_without_effect(HOST, Given, {"delta": 3.0, "absent": 1}) is None


def test_adapters_need_neither_their_trainers_nor_our_engines():
    names = [f"steadyrl.adapters.{path.stem}" for path in sorted(Path(common.__file__).parent.glob("for_*.py"))]
    assert len(names) == 13
    forbidden = ["transformers", "ray", "verl", "trl", "tinker", "megatron", "steadyrl.models", "steadyrl.engines"]
    code = f"import sys, {', '.join(names)}; print([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
