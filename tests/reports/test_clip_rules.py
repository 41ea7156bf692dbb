"""What each rule would do to recorded tokens, against the formulas written out for one token."""

import math

import numpy as np
import pytest
from reports.synthetic import make_config, make_scored_batch

from steadyrl.method import ObjectiveConfig
from steadyrl.reports.clip_rules import can_judge, judge, own_objective, rules_of

LOW, HIGH = 0.1, 0.15
SEEN = {"grpo": ".lh", "gspo": ".lh", "sat-grpo": ".lhgGLHmM", "sat-gspo": ".hgGM"}


@pytest.fixture(scope="module")
def rollouts():
    """Two optimizer steps with drifts of different size, so that a quantile over both would be another one."""
    first, second = make_scored_batch(4, groups=6), make_scored_batch(5, groups=6)
    for batch, scale in ((first, 0.3), (second, 5)):
        for rollout in batch.rollouts:
            drift = rollout.consumed.trainer_logp - rollout.behavior_logp
            rollout.consumed.trainer_logp[:] = rollout.behavior_logp + scale * drift
    return [rollout.to_json() for batch in (first, second) for rollout in batch.rollouts]


def clip_letter(log_ratio, advantage, low, high):
    ratio = math.exp(log_ratio)
    if advantage < 0 and ratio < 1 - low:
        return "l"
    return "h" if advantage > 0 and ratio > 1 + high else "."


def sat_letter(log_ratio, advantage, q):
    """Paper, Eq. 15 to 19, with the Hill kernel and exponent 2."""
    plain = clip_letter(log_ratio, advantage, LOW, HIGH)
    if abs(log_ratio) <= q:
        return plain
    c = 1 / (1 + (log_ratio / q) ** 2)
    low, high = LOW * (c if log_ratio < 0 else 1), HIGH * (c if log_ratio > 0 else 1)
    narrow = clip_letter(log_ratio, advantage, low, high)
    if plain != ".":
        return "m" if log_ratio < 0 else "M"
    if narrow != ".":
        return "L" if log_ratio < 0 else "H"
    return "g" if log_ratio < 0 else "G"


def log_ratios(rollout, unit):
    mask = np.array(rollout["loss_mask"], bool)
    d = (np.float32(rollout["trainer_logp"]) - np.float32(rollout["behavior_logp"]))[mask]
    return np.full(len(d), d.mean(dtype=float)) if unit == "sequence" else d.astype(float)


def quantile(rollouts, unit):
    sizes = np.sort(np.abs(np.concatenate([log_ratios(rollout, unit) for rollout in rollouts])))
    return sizes[math.ceil(0.9 * len(sizes)) - 1]


def objective(preset):
    radii = {"low": LOW, "high": HIGH}
    return ObjectiveConfig.model_validate({"preset": preset, "boundary": radii})


@pytest.mark.parametrize("preset", ["grpo", "gspo", "sat-grpo", "sat-gspo"])
def test_clip_and_sat_do_what_their_formulas_say(rollouts, preset):
    unit = "sequence" if "gspo" in preset else "token"
    verdicts = judge(objective(preset), rollouts)
    seen = set()
    for version in (4, 5):
        members = [index for index, rollout in enumerate(rollouts) if rollout["train_version"] == version]
        q = quantile([rollouts[index] for index in members], unit)
        for index in members:
            rollout, verdict = rollouts[index], verdicts[index]
            ratios = log_ratios(rollout, unit)
            if preset.startswith("sat"):
                expected = [sat_letter(x, rollout["advantage"], q) for x in ratios]
                assert verdict.q == pytest.approx(q, rel=1e-6)
            else:
                expected = [clip_letter(x, rollout["advantage"], LOW, HIGH) for x in ratios]
                assert verdict.q is None
            assert verdict.letters == "  " + "".join(expected)  # two prompt tokens
            seen |= set(expected)
    assert seen >= set(SEEN[preset]), "the data leave a case out"


def test_dppo_drops_outward_tokens_that_moved_far_in_probability(rollouts):
    for rollout, verdict in zip(rollouts, judge(ObjectiveConfig.model_validate("dppo-tv"), rollouts), strict=True):
        mask = np.array(rollout["loss_mask"], bool)
        p, p0 = (np.exp(np.array(rollout[name])[mask]) for name in ("trainer_logp", "behavior_logp"))
        a = rollout["advantage"]
        expected = ["h" if a > 0 and gap > 0.15 else "l" if a < 0 and gap < -0.15 else "." for gap in p - p0]
        assert verdict.letters == "  " + "".join(expected)


def test_the_rules_have_the_radii_and_the_anchor_of_the_recipe():
    config = make_config("gspo").model_dump()
    config["objective"]["boundary"] |= {"low": 0.03, "high": 0.05}
    config["objective"]["anchor"] = "old_actor"
    rules = {rule.name: rule for rule in rules_of(config)}
    assert list(rules) == ["GRPO clip", "SAT-GRPO", "GSPO clip (this run)", "SAT-GSPO", "DPPO"]
    for name in list(rules)[:4]:
        boundary = rules[name].objective.boundary.model_dump()
        assert (boundary["low"], boundary["high"]) == (0.03, 0.05)
    assert {rule.objective.anchor for rule in rules.values()} == {"old_actor"}
    assert rules["SAT-GSPO"].about == "sequence ratio against old_actor, low 0.03, high 0.05, alpha 0.9, kernel hill"


def test_a_rule_of_another_kind_is_added_and_an_unknown_one_left_out():
    assert rules_of(make_config("spo").model_dump())[0].name == "spo (this run)"
    assert len(rules_of(make_config("trpo").model_dump())) == 5  # it needs distributions, which are not recorded
    assert own_objective({"objective": {"boundary": {"rule": "of a later version"}}}) is None
    assert len(rules_of({"objective": {"boundary": {"rule": "of a later version"}}})) == 5


def test_with_the_anchor_old_actor_the_ratio_leaves_the_engine_out(rollouts):
    row = {**rollouts[0], "old_logp": rollouts[0]["trainer_logp"]}
    config = ObjectiveConfig.model_validate({"preset": "grpo", "anchor": "old_actor"})
    (verdict,) = judge(config, [row])
    assert set(verdict.letters) == {" ", "."}  # every ratio is 1


def test_what_was_not_trained_on_cannot_be_judged(rollouts):
    assert can_judge(rollouts[0], needs_old_logp=False)
    assert not can_judge(rollouts[0], needs_old_logp=True)
    for name, value in (("trainer_logp", None), ("trainer_logp", [0.0]), ("advantage", None), ("train_version", None)):
        assert not can_judge({**rollouts[0], name: value}, needs_old_logp=False)
    broken = list(rollouts[0]["trainer_logp"])
    broken[3] = None  # NaN, as JSON has it
    assert not can_judge({**rollouts[0], "trainer_logp": broken}, needs_old_logp=False)
