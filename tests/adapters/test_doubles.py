"""Adapters for trainers that need a GPU to import: the documented call is played by stand-ins, exactly as it is made.

`parity.py` has the same for the trainers that import on a CPU, against the packages themselves.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.padded import Padded, difference, direct, make_padded, stand_in, threshold_of
from torch import Tensor

from steadyrl.adapters import for_areal, for_nemo_rl, for_prime_rl, for_roll, for_slime, for_slime_hooks, for_verl
from steadyrl.adapters.for_openrlhf import ObjectivePolicyLoss, install
from steadyrl.errors import ConfigError

# the rules of the trainers' own losses, and objectives that none of them has
OBJECTIVES = ["grpo", "gspo", "dppo-tv", "sat-grpo", "sat-gspo", "sat-gspo-response", "m2po", "ipo"]


# ---- prime-rl: one sequence a call, prompt included, a sum over its tokens ----


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


@pytest.fixture
def prime_rl(monkeypatch):
    stand_in(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=LossOutputs)
    monkeypatch.setattr(for_prime_rl, "_recent", {})


def prime_rl_gradient(batch: Padded, weights: Tensor | None = None, **kwargs: Any) -> Tensor:
    """The loop of its `compute_loss`: sums of sequences, divided by the tokens of the batch."""
    total, scale = torch.tensor(0.0), batch.counts.num_tokens
    for row in range(batch.rows):
        inputs = LossInputs(
            trainer_logprobs=batch.logp[row],
            inference_logprobs=batch.behavior[row],
            ref_logprobs=None,
            advantages=batch.spread(batch.advantage)[row],
            loss_mask=batch.mask[row],
            loss_weights=None if weights is None else weights[row],
        )
        result = for_prime_rl.loss(inputs, **kwargs)
        assert result.loss.dim() == 0
        assert all(value.dim() == 0 for value in result.metrics.values())
        assert "mismatch/d_bar" in result.metrics
        total = total + result.loss
    return torch.autograd.grad(total / scale, batch.logp)[0]


@pytest.mark.parametrize("preset", ["grpo", "gspo", "dppo-tv", "ipo"])
def test_prime_rl(preset, prime_rl):
    batch = make_padded().leaf()
    _, expected = direct({"preset": preset, "aggregation": "token_mean"}, batch)
    assert difference(prime_rl_gradient(batch, objective=preset), expected) < 1e-6


def test_prime_rl_its_default_loss(prime_rl):
    """DPPO's mask, weight r, and kl_tau (log r)^2, written out."""
    batch = make_padded(drift=0.3).leaf()
    ratio = (batch.logp - batch.behavior).exp()
    moved, advantage = batch.logp.exp() - batch.behavior.exp(), batch.spread(batch.advantage)
    kept = torch.where(advantage > 0, moved <= 0.1, moved >= -0.1)
    terms = -(kept.detach() * advantage * ratio) + 1e-3 * (batch.logp - batch.behavior) ** 2
    expected = torch.autograd.grad((terms * batch.mask).sum() / batch.counts.num_tokens, batch.logp)[0]
    boundary = {"rule": "dppo", "divergence": "tv", "low": 0.1, "high": 0.1, "cap": 1e9}
    found = prime_rl_gradient(batch, objective={"preset": "dppo-tv", "boundary": boundary, "log_ratio_coef": 1e-3})
    assert difference(found, expected) < 1e-6


def with_a_drifted_end(preset: str) -> Padded:
    """Fifteen responses that have hardly moved, and a short one that the batch does not admit; alone it would be."""
    batch = make_padded(rows=16, drift=0.01)
    logp, advantage, mask = batch.logp.clone(), batch.advantage.clone(), batch.mask.clone()
    logp[-1], advantage[-1] = batch.behavior[-1] + (2.0 if preset == "m2po" else 0.15), 1.0
    mask[-1] = torch.arange(batch.width) < 2
    return replace(batch, logp=logp, advantage=advantage, mask=mask).leaf()


@pytest.mark.parametrize("preset", ["sat-grpo", "sat-gspo", "sat-gspo-response", "m2po"])
def test_prime_rl_takes_the_quantile_over_a_window(preset, prime_rl):
    """The last call of a batch sees the scores of all of it."""
    batch = with_a_drifted_end(preset)
    table = {"preset": preset, "aggregation": "token_mean"}
    _, expected = direct(table, batch, threshold=threshold_of(table, batch))
    assert expected[-1].abs().max() == 0
    assert prime_rl_gradient(batch, objective=preset)[-1].abs().max() == 0
    for_prime_rl._recent.clear()
    last = Padded(*(getattr(batch, name)[-1:] for name in batch.__dataclass_fields__)).leaf()
    assert prime_rl_gradient(last, objective=preset).abs().max() > 0


def test_prime_rl_weights_multiply_every_term(prime_rl):
    batch = make_padded().leaf()
    weights = torch.rand(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    plain = prime_rl_gradient(batch, objective="ipo")
    assert difference(prime_rl_gradient(batch, weights, objective="ipo"), plain * weights) < 1e-6


def test_prime_rl_has_no_policy_between_engine_and_trainer(prime_rl):
    with pytest.raises(ConfigError, match="prime-rl has no log-probabilities for anchor = 'old_actor'"):
        prime_rl_gradient(make_padded().leaf(), objective="icepop")


# ---- NeMo-RL: keyword call with [B, S] data and [B, S - 1] log-probabilities ----


@pytest.fixture
def nemo_rl(monkeypatch):
    class LossType(enum.Enum):
        TOKEN_LEVEL = "token_level"
        SEQUENCE_LEVEL = "sequence_level"

    class LossInputType(enum.Enum):
        LOGPROB = "logprob"

    stand_in(monkeypatch, "nemo_rl.algorithms.loss.interfaces", LossType=LossType, LossInputType=LossInputType)


def nemo_rl_result(batch: Padded, **loss_fn: Any) -> tuple[Any, Tensor, dict[str, float]]:
    """Two micro-batches of an optimizer step, whose losses and metrics are added up."""
    loss = for_nemo_rl.ObjectiveLoss(loss_fn)
    first = torch.zeros(batch.rows, 1, dtype=torch.float64)

    def with_prompt(values: Tensor) -> Tensor:
        return torch.cat([first.to(values.dtype), values], dim=1)

    data = {
        "token_mask": with_prompt(batch.mask.double()),
        "sample_mask": torch.ones(batch.rows),
        "advantages": with_prompt(batch.spread(batch.advantage)),
        "generation_logprobs": with_prompt(batch.behavior),
        "prev_logprobs": with_prompt(batch.old),
        "reference_policy_logprobs": with_prompt(batch.reference),
    }
    total, metrics = torch.tensor(0.0), {}
    for rows in (slice(0, 2), slice(2, batch.rows)):
        part, found = loss(
            next_token_logprobs=batch.logp[rows],
            data={name: values[rows] for name, values in data.items()},
            global_valid_seqs=torch.tensor(float(batch.rows)),
            global_valid_toks=torch.tensor(float(batch.counts.num_tokens)),
        )
        total = total + part
        metrics = {name: metrics.get(name, 0.0) + value for name, value in found.items()}
    return loss, torch.autograd.grad(total, batch.logp)[0], metrics


@pytest.mark.parametrize("preset", ["grpo", "gspo", "dppo-tv", "sat-grpo-microbatch", "icepop"])
@pytest.mark.parametrize("per_token", [True, False])
def test_nemo_rl(preset, per_token, nemo_rl):
    batch = make_padded().leaf()
    changes = {"anchor": "step_start"} if preset == "icepop" else {}
    table = {"preset": preset, **changes, "aggregation": "token_mean" if per_token else "sequence_mean"}
    given = {"preset": preset, **changes}
    if preset == "sat-grpo-microbatch":  # the oracle takes the micro-batches one by one
        parts = [
            Padded(*(getattr(batch, n)[rows] for n in batch.__dataclass_fields__))
            for rows in (slice(0, 2), slice(2, 6))
        ]
        pieces = [direct(table, part)[1] * part.counts.num_tokens / batch.counts.num_tokens for part in parts]
        if not per_token:
            pieces = [direct(table, part)[1] * part.rows / batch.rows for part in parts]
        expected = torch.cat(pieces)
    else:
        _, expected = direct(table, batch)
    loss, found, metrics = nemo_rl_result(batch, objective=given, token_level_loss=per_token, steps_per_batch=2)
    assert difference(found, expected) < 1e-6
    assert loss.input_type.value == "logprob"
    assert loss.loss_type.value == ("token_level" if per_token else "sequence_level")
    drift = (batch.logp - batch.behavior)[batch.mask].abs().mean()
    assert metrics["mismatch/d_bar"] == pytest.approx(float(drift.detach()))  # added up over micro-batches: the mean


def test_nemo_rl_kl_and_window(nemo_rl):
    batch = make_padded(rows=9).leaf()
    kl = {"preset": "grpo", "aggregation": "token_mean", "kl_coef": 0.2}
    _, found, metrics = nemo_rl_result(batch, objective="grpo", reference_policy_kl_penalty=0.2)
    assert difference(found, direct(kl, batch)[1]) < 1e-6
    assert metrics["penalty/kl_ref"] > 0
    drifted = with_a_drifted_end("sat-gspo")
    _, found, _ = nemo_rl_result(drifted, objective="sat-gspo")
    table = {"preset": "sat-gspo", "aggregation": "token_mean"}
    expected = direct(table, drifted, threshold=threshold_of(table, drifted))[1]
    assert difference(found[2:], expected[2:]) < 1e-6  # the second micro-batch sees the first one's scores, too
    assert found[-1].abs().max() == 0


# ---- ROLL: a worker with [B, S] data and [B, S - 1] log-probabilities ----


def roll_agg_loss(loss_mat, loss_mask, loss_agg_mode, batch_num_tokens=None, global_valid_samples=None, weights=None):
    """What the documentation says of ROLL's: its token mean does not look at the mask."""
    if loss_agg_mode == "token-mean":
        return loss_mat.sum() / batch_num_tokens
    assert loss_agg_mode == "seq-mean-token-mean"
    return ((loss_mat * loss_mask).sum(1) / loss_mask.sum(1)).sum() / global_valid_samples


class RollWorker:
    pipeline_config: Any

    def get_old_log_probs_with_cache(self, data: Any, log_probs: Tensor) -> Tensor:
        return data.batch["old_log_probs"]


def roll_gradient(monkeypatch, batch: Padded, objective: Any, mode: str, steps: int | None = None, **config: Any):
    stand_in(monkeypatch, "roll.utils.functionals", agg_loss=roll_agg_loss)
    members = {"objective": objective, "steps_per_batch": steps}
    worker = type("Worker", (for_roll.ROLLObjective, RollWorker), members)()
    worker.strategy = SimpleNamespace(op_compute_log_probs=lambda logits, input_ids, attention_mask: logits)
    values = {"loss_agg_mode": mode, "use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_loss_coef": 0.0}
    worker.pipeline_config = SimpleNamespace(**{**values, **config})
    prompt = torch.zeros(batch.rows, 1, dtype=torch.bool)
    data = SimpleNamespace(
        batch={
            "response_mask": torch.cat([prompt, batch.mask], dim=1),
            "input_ids": None,
            "advantages": batch.spread(batch.advantage),
            "infer_logprobs": batch.behavior,
            "old_log_probs": batch.old,
            "ref_log_probs": batch.reference,
        },
        meta_info={
            "batch_num_tokens": {"response_mask": batch.counts.num_tokens},
            "global_valid_samples": {"response_mask": batch.rows},
        },
    )
    loss, metrics = worker.loss_func(data, batch.logp)
    assert metrics["actor/total_loss"] == pytest.approx(float(loss))
    assert "actor/mismatch/d_bar" in metrics
    return torch.autograd.grad(loss, batch.logp)[0]


@pytest.mark.parametrize("preset", OBJECTIVES)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_roll(preset, mode, monkeypatch):
    batch = make_padded().leaf()
    aggregation = "token_mean" if mode == "token-mean" else "sequence_mean"
    _, expected = direct({"preset": preset, "aggregation": aggregation}, batch)
    assert difference(roll_gradient(monkeypatch, batch, preset, mode), expected) < 1e-6


def test_roll_kl_and_what_it_refuses(monkeypatch):
    batch = make_padded().leaf()
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.3}
    found = roll_gradient(monkeypatch, batch, "grpo", "token-mean", **kl)
    _, expected = direct({"preset": "grpo", "aggregation": "token_mean", "kl_coef": 0.3}, batch)
    assert difference(found, expected) < 1e-6
    corrected = SimpleNamespace(is_weight=SimpleNamespace(enabled=True), filters=[])
    with pytest.raises(ConfigError, match="count the mismatch twice"):
        roll_gradient(monkeypatch, batch, "sat-gspo", "token-mean", train_infer_correction=corrected)
    with pytest.raises(ConfigError, match="every ratio is 1"):
        roll_gradient(monkeypatch, batch, {"preset": "grpo", "anchor": "step_start"}, "token-mean", steps=1)


# ---- slime: lists of samples, a reducer, sums over samples ----


def slime_gradient(monkeypatch, batch: Padded, table: Any, **changes: Any) -> Tensor:
    leaf = batch.leaf()
    masks = [mask.int() for mask in batch.split(batch.mask)]
    lengths = [len(mask) for mask in masks]

    def scored(logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy, top_p=None):
        assert top_p == 0.9  # the mask of the rollout's nucleus is handed on
        return logits, {"log_probs": leaf.split(leaf.logp), "entropy": leaf.split(leaf.logp**2)}

    stand_in(
        monkeypatch,
        "slime.backends.megatron_utils.loss",
        get_log_probs_and_entropy=scored,
        get_rollout_top_p_logprob_kwargs=lambda args, data: {"top_p": 0.9},
    )
    values = {"entropy_coef": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl"}
    values |= {"rollout_batch_size": 8, "n_samples_per_prompt": 2, "global_batch_size": 4, "keep_old_actor": False}
    args = SimpleNamespace(**{**values, "steadyrl_objective": table, **changes})
    data = {
        "unconcat_tokens": [],
        "total_lengths": [n + 2 for n in lengths],
        "response_lengths": lengths,
        "loss_masks": masks,
        "advantages": batch.split(batch.spread(batch.advantage)),
        "rollout_log_probs": batch.split(batch.behavior),
        "log_probs": batch.split(batch.old),
        "ref_log_probs": batch.split(batch.reference),
    }

    def sum_of_sample_mean(flat: Tensor) -> Tensor:
        return sum((x * m).sum() / m.sum().clamp(min=1) for x, m in zip(flat.split(lengths), masks, strict=True))

    loss, metrics = for_slime.policy_loss(args, data, torch.zeros(1, 1, 1, requires_grad=True), sum_of_sample_mean)
    drift = (batch.logp - batch.behavior)[batch.mask].abs().mean()
    assert float(torch.as_tensor(metrics["mismatch/d_bar"])) == pytest.approx(
        float(drift) * batch.rows
    )  # slime divides
    return torch.autograd.grad(loss, leaf.logp)[0]


@pytest.mark.parametrize("preset", OBJECTIVES)
def test_slime(preset, monkeypatch):
    batch = make_padded()
    _, expected = direct({"preset": preset, "aggregation": "sequence_mean"}, batch)
    assert difference(slime_gradient(monkeypatch, batch, preset) / batch.rows, expected) < 1e-6


def test_slime_anchors_kl_and_entropy(monkeypatch):
    batch = make_padded()
    kept = slime_gradient(monkeypatch, batch, "sat-grpo-tis", keep_old_actor=True)
    _, expected = direct({"preset": "sat-grpo-tis", "aggregation": "sequence_mean"}, batch)
    assert difference(kept / batch.rows, expected) < 1e-6
    penalized = slime_gradient(monkeypatch, batch, "grpo", use_kl_loss=True, kl_loss_coef=0.2)
    _, expected = direct({"preset": "grpo", "aggregation": "sequence_mean", "kl_coef": 0.2}, batch)
    assert difference(penalized / batch.rows, expected) < 1e-6
    surprised = slime_gradient(monkeypatch, batch, "grpo", entropy_coef=0.1)
    share = batch.mask / batch.mask.sum(1, keepdim=True)
    plain = slime_gradient(monkeypatch, batch, "grpo")
    assert difference(surprised - plain, -0.1 * share * 2 * batch.logp) < 1e-6


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("icepop", {}, "add --keep-old-actor"),
        ({"preset": "grpo", "anchor": "step_start"}, {"keep_old_actor": True}, "leave out --keep-old-actor"),
        ({"preset": "grpo", "anchor": "step_start"}, {"global_batch_size": 16}, "every ratio is 1"),
        ("icepop", {"keep_old_actor": True, "use_rollout_logprobs": True}, "does not score the batch"),
        ("sat-gspo", {"use_tis": True}, "set use_tis=False"),
        ("sat-gspo", {"context_parallel_size": 2}, "set --context-parallel-size 1"),
        ("sat-gspo", {"use_kl_loss": True, "kl_loss_type": "k1"}, "--kl-loss-type low_var_kl"),
        ({"preset": "sat-gspo", "aggregation": "token_mean"}, {}, "set --calculate-per-token-loss"),
    ],
)
def test_slime_refuses(table, changes, message, monkeypatch):
    with pytest.raises(ConfigError, match=message):
        slime_gradient(monkeypatch, make_padded(), table, **changes)


def slime_correction(batch: Padded, objective: str, use_tis: bool = True) -> tuple[Tensor, Any, dict[str, Tensor]]:
    lengths = [len(part) for part in batch.split(batch.mask)]
    return for_slime_hooks.correction(
        SimpleNamespace(steadyrl_objective=objective, use_tis=use_tis),
        pg_loss=torch.ones(sum(lengths), dtype=torch.float64),
        train_log_probs=batch.split(batch.old),
        rollout_log_probs=batch.split(batch.behavior),
        loss_masks=batch.split(batch.mask),
        total_lengths=[n + 2 for n in lengths],
        response_lengths=lengths,
    )


def test_slime_hooks():
    batch = make_padded(drift=2.0)
    k = torch.cat(batch.split(batch.old - batch.behavior)).exp()
    active = torch.cat(batch.split(batch.mask))
    weighted, masks, metrics = slime_correction(batch, "icepop")
    expected = torch.where((k >= 0.5) & (k <= 5), k, 0.0)
    assert torch.allclose(weighted[active], expected[active])
    assert (weighted[active] == 0).any()
    assert [len(mask) for mask in masks] == [len(part) for part in batch.split(batch.mask)]
    assert metrics["correction_weight"].shape == weighted.shape
    untouched, _, seen = slime_correction(batch, "icepop", use_tis=False)  # --get-mismatch-metrics alone
    assert (untouched == 1).all()
    assert torch.equal(seen["correction_weight"], metrics["correction_weight"])
    with pytest.raises(ConfigError, match="icepop, mis or geo-rs"):
        slime_correction(batch, "sat-gspo")
    lengths = [2, 3]
    reduce = for_slime_hooks.sequence_sum([4, 5], lengths, [torch.tensor([1, 0]), torch.tensor([1, 1, 0])], False)
    assert float(reduce(torch.tensor([1.0, 100.0, 10.0, 20.0, 100.0]))) == 31.0


# ---- verl, OpenRLHF and AReaL: their call, without the packages ----


def test_verl(monkeypatch):
    def agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, **_):
        assert loss_agg_mode == "token-mean"
        return (loss_mat * loss_mask).sum() / batch_num_tokens * dp_size

    stand_in(monkeypatch, "verl.trainer.ppo.core_algos", agg_loss=agg_loss)
    batch = make_padded().leaf()
    policy = SimpleNamespace(objective={"preset": "sat-gspo"}, bypass_mode=True, steps_per_batch=1)
    info = {
        "dp_size": 2,
        "batch_num_tokens": batch.counts.num_tokens,
        "global_batch_size": 6,
        "loss_scale_factor": None,
    }
    loss, metrics = for_verl.policy_loss(
        old_log_prob=batch.behavior,
        log_prob=batch.logp,
        advantages=batch.spread(batch.advantage),
        response_mask=batch.mask,
        loss_agg_mode="token-mean",
        config=SimpleNamespace(policy_loss=policy, global_batch_info=info),
    )
    _, expected = direct({"preset": "sat-gspo", "aggregation": "token_mean"}, batch)
    assert difference(torch.autograd.grad(loss, batch.logp)[0], 2 * expected) < 1e-6
    assert {"actor/sat/q", "actor/sat/gate_rate", "actor/mismatch/d_bar"} <= set(metrics)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"objective": "sat-gspo", "bypass_mode": False}, "bypass_mode=True"),
        ({"objective": {"preset": "grpo", "anchor": "step_start"}, "bypass_mode": False}, "every ratio is 1"),
        (
            {"objective": {"preset": "grpo", "anchor": "step_start"}, "bypass_mode": True, "steps_per_batch": 4},
            "anchor to",
        ),
        ({"objective": "icepop", "bypass_mode": True}, "no log-probabilities for anchor = 'old_actor'"),
    ],
)
def test_verl_refuses(policy, message):
    with pytest.raises(ConfigError, match=message):
        for_verl.objective_of(SimpleNamespace(**{"steps_per_batch": 1, **policy}))


def test_openrlhf_installs_itself(monkeypatch):
    class ActorPPOTrainer:
        def training_step(self, experience: Any) -> dict[str, Any]:
            self.actor_loss_fn.metrics = {"sat/q": 0.5}
            return {"metrics": {"policy_loss": torch.tensor(1.0)}, "weights": {"policy_loss": "token"}}

    actor = stand_in(monkeypatch, "openrlhf.trainer.ray.ppo_actor", PolicyLoss=None, ActorPPOTrainer=ActorPPOTrainer)
    stand_in(monkeypatch, "openrlhf.models", aggregate_loss=lambda *_, **__: None)
    install({"preset": "sat-gspo"})
    made = actor.PolicyLoss(
        clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=None, token_level_loss=True, policy_loss_type="ppo",
        is_correction_level="token", is_correction_mode="mask", is_correction_gating="ratio",
        is_correction_threshold=[0.5, 5.0],
    )  # fmt: skip
    assert isinstance(made, ObjectivePolicyLoss)
    trainer = ActorPPOTrainer()
    trainer.actor_loss_fn = made
    status = trainer.training_step(None)
    assert float(status["metrics"]["sat/q"]) == 0.5
    assert status["weights"] == {"policy_loss": "token", "sat/q": "token"}


def test_openrlhf_refuses():
    with pytest.raises(ConfigError, match="policy_loss_type and dual_clip"):
        ObjectivePolicyLoss("sat-gspo", None, lambda *_: torch.tensor(0.0), policy_loss_type="gspo")
    batch = make_padded()
    loss = ObjectivePolicyLoss("sat-gspo", None, lambda *_: torch.tensor(0.0))
    with pytest.raises(ConfigError, match="is_correction_level token"):
        loss(batch.logp, batch.old, batch.spread(batch.advantage), batch.mask)


def test_areal_installs_itself_and_shifts_versions(monkeypatch):
    actor = stand_in(monkeypatch, "areal.trainer.ppo.actor", grpo_loss_fn=None)
    logged: dict[str, float] = {}
    stand_in(monkeypatch, "areal.utils", stats_tracker=SimpleNamespace(scalar=lambda **values: logged.update(values)))
    for_areal.install("a3po")
    # one response, its fields at the position before each token; the versions at the token itself
    behavior, logp = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-0.9, -2.2, -1.0], requires_grad=True)
    data = {
        "logprobs": behavior,
        "advantages": torch.ones(3),
        "loss_mask": torch.tensor([True, True, False]),
        "cu_seqlens": torch.tensor([0, 3]),
        "versions": torch.tensor([-1, 5, 3]),
    }
    own = {"eps_clip": 0.2, "rejection_sampling": None, "m2_threshold": None, "use_sapo_loss": False}
    loss = actor.grpo_loss_fn(logp, torch.zeros(3), data, current_version=7, vocab_min_logits=None, **own)
    # ages 2 and 4: the anchor takes a half and three quarters of the way, and the weight is r^(1 - 1 / age)
    r = (logp - behavior).detach()[:2].exp()
    assert torch.allclose(torch.autograd.grad(loss, logp)[0][:2], -r / 2)
    assert logged["correction/weight"] == pytest.approx(float((r ** torch.tensor([1 / 2, 3 / 4])).mean()))
    assert {"entropy", "mismatch/d_bar", "correction/weight"} <= set(logged)
    with pytest.raises(ConfigError, match="set m2_threshold=None"):
        actor.grpo_loss_fn(logp, torch.zeros(3), data, current_version=7, m2_threshold=0.04)
