import inspect

import pytest
from pydantic import ValidationError

from steadyrl import presets
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig
from steadyrl.presets import PRESETS
from steadyrl.recipe import build_config

# fmt: off
EXPECTED = [
    "grpo", "gspo", "sat-grpo", "sat-gspo", "gspo-published", "gspo-token", "grpo-product", "dapo", "dr-grpo",
    "grpo-dual-clip", "dppo-tv", "dppo-kl", "dppo-topk-tv", "dppo-topk-kl", "dppo-sat-paper", "spo", "drpo",
    "sapo", "cispo", "dis", "ipo", "kpop", "m2po", "a3po", "vespo", "vaco", "opsm", "trm", "seqclip", "mu-grpo",
    "up", "topr", "trpo", "pg-is", "reinforce", "tis-pg", "grpo-tis", "gspo-tis", "sat-grpo-tis",
    "grpo-seq-tis", "icepop", "mis", "geo-rs", "decoupled-ppo", "sat-grpo-exp", "sat-grpo-gauss",
    "sat-grpo-power", "sat-grpo-zero", "sat-gspo-response",
]
# fmt: on


def objective(**changes) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate(changes)


def test_every_method_has_its_name():
    assert set(EXPECTED) <= set(PRESETS)
    assert len(PRESETS) >= 34


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_objective_that_says_what_it_is(name):
    config = objective(preset=name)
    assert config.describe().startswith(f"{name}: {config.unit} ratio against {config.anchor}, {config.boundary.rule}")


def test_no_two_presets_are_the_same_objective():
    seen = {}
    for name in PRESETS:
        values = objective(preset=name).model_dump_json(exclude={"preset"})
        assert values not in seen, f"{name} is {seen[values]}"
        seen[values] = name


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_with_a_correction_has_an_anchor_that_needs_one(name):
    config = objective(preset=name)
    assert config.correction is None or config.anchor in ("old_actor", "prox_approx")


@pytest.mark.parametrize("name", [name for name in PRESETS if objective(preset=name).anchor != "step_start"])
def test_a_preset_can_be_trained_with_one_step_per_batch(name):
    assert build_config({"objective": name}).objective.preset == name


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("gspo", "boundary.low", 0.2),
        ("gspo", "boundary.high", 0.2),
        ("gspo-published", "boundary.low", 3e-4),
        ("gspo-published", "boundary.high", 4e-4),
        ("dapo", "boundary.low", 0.2),
        ("dapo", "boundary.high", 0.28),
        ("grpo-dual-clip", "boundary.dual", 3.0),
        ("dppo-tv", "boundary.high", 0.15),
        ("dppo-topk-tv", "boundary.low", 0.15),
        ("dppo-kl", "boundary.high", 0.05),
        ("dppo-topk-kl", "boundary.low", 0.05),
        ("dppo-sat-paper", "boundary.high", 1e-3),
        ("dppo-sat-paper", "boundary.clip", 0.2),
        ("dppo-tv", "boundary.clip", None),
        ("dis", "boundary.low", 0.3),
        ("dis", "boundary.high", 5.0),
        ("ipo", "log_ratio_coef", 1e-3),
        ("ipo", "boundary.threshold", 0.1),
        ("kpop", "boundary.phi", 0.1),
        ("m2po", "boundary.budget", 0.04),
        ("cispo", "boundary.high", 4.0),
        ("sapo", "boundary.tau_negative", 1.05),
        ("vespo", "boundary.lambda_positive", 3.0),
        ("vespo", "boundary.k_negative", 3.0),
        ("tis-pg", "boundary.cap", 2.0),
        ("grpo-tis", "correction.cap", 2.0),
        ("grpo-seq-tis", "correction.level", "sequence"),
        ("icepop", "correction.low", 0.5),
        ("icepop", "correction.high", 5.0),
        ("mis", "correction.high", 2.0),
        ("sat-grpo", "boundary.alpha", 0.9),
        ("sat-grpo", "boundary.exponent", 2.0),
        ("sat-grpo", "boundary.kernel", "hill"),
        ("sat-gspo", "boundary.quantile_scope", "batch"),
        ("dr-grpo", "advantage", "group_centered"),
    ],
)
def test_numbers_of_the_sources(name, path, value):
    found = objective(preset=name)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_every_preset_has_a_comment():
    """A comment of its own or of its group stands above each entry, and has a source or owns up to be ours."""
    lines = inspect.getsource(presets).split("PRESETS: dict", 1)[1].splitlines()
    comment = ""
    for line in lines:
        comment = line if line.startswith("    #") else comment
        assert not line.startswith('    "') or comment


# ---- overrides --------------------------------------------------------------------------------------------


def test_a_part_of_a_table_can_be_overridden():
    config = build_config({"objective": "grpo-tis"}, ["objective.correction.cap=5.0", "objective.boundary.high=0.28"])
    assert config.objective.correction.kind == "tis"
    assert config.objective.correction.cap == 5.0
    assert config.objective.boundary.low == 0.2
    assert config.objective.boundary.high == 0.28


def test_another_rule_or_kind_starts_from_its_own_defaults():
    config = objective(preset="grpo-seq-tis", boundary={"rule": "spo"}, correction={"kind": "mis"})
    assert config.boundary.eps == 0.2
    assert config.correction.high == 2.0


def test_the_constant_of_a_preset_goes_with_its_aggregation():
    assert objective(preset="dr-grpo").aggregation_tokens == 32
    assert objective(preset="dr-grpo", aggregation="token_mean").aggregation_tokens is None
    assert objective(preset="dr-grpo", aggregation_tokens=64).aggregation_tokens == 64


# ---- refusals ---------------------------------------------------------------------------------------------

REFUSED = [  # what is asked for, and what the answer names: the reason, the remedy
    ({"preset": "grpo-tis", "anchor": "rollout"}, ["exactly 1", "twice", "objective.anchor=old_actor"]),
    ({"preset": "a3po", "anchor": "rollout"}, ["exactly 1", "objective.anchor=old_actor"]),
    ({"preset": "geo-rs", "anchor": "rollout"}, ["of = 'mismatch'", "objective.anchor=old_actor"]),
    ({"preset": "grpo", "reject": [{"kind": "k3"}]}, ["of = 'mismatch'", "of = 'policy'"]),
    ({"preset": "vespo", "unit": "token"}, ["'vespo'", "objective.unit=product"]),
    ({"preset": "vespo", "unit": "sequence"}, ["'vespo'", "objective.unit=product"]),
    ({"preset": "dppo-tv", "unit": "sequence"}, ["'dppo'", "objective.unit=token"]),
    ({"preset": "ipo", "unit": "product"}, ["'ipo'", "objective.unit=token"]),
    ({"preset": "kpop", "unit": "sequence_token"}, ["'kpop'", "objective.unit=token"]),
    ({"preset": "drpo", "unit": "sequence"}, ["'drpo'", "objective.unit=token"]),
    ({"preset": "trpo", "unit": "sequence"}, ["'trpo'", "objective.unit=token"]),
    ({"preset": "trpo", "anchor": "old_actor"}, ["'trpo'", "objective.anchor=rollout"]),
    ({"preset": "dppo-topk-kl", "anchor": "prox_approx"}, ["'dppo'", "objective.anchor=rollout"]),
    ({"preset": "up", "unit": "product"}, ["'unbounded_positive'", "objective.unit to token"]),
    ({"preset": "sat-grpo-const", "boundary": {"strength": 1.5}}, ["const", "strength to 1 or less"]),
    ({"preset": "grpo", "boundary": {"dual": 1.15}}, ["1.15", "dual above 1 + high"]),
    ({"preset": "reinforce", "boundary": {"cap": 2.0}}, ["cap", "weighted=true"]),
    ({"aggregation": "constant"}, ["aggregation_tokens", "sampling.max_response_tokens"]),
    ({"aggregation_tokens": 32}, ["no effect", "aggregation=constant"]),
    (
        {"reject": [{"kind": "trust_region", "max_k2": None, "mean_k3": None}]},
        ["rejects nothing", "set max_k2"],
    ),
    ({"preset": "seqclip", "reject": [{"kind": "geometric", "low": 1.1, "high": 1.2}]}, ["low <= 1 <= high"]),
    ({"preset": "opsm", "reject": [{"kind": "off_policy"}] * 2}, ["two off_policy", "leave out one"]),
    ({"preset": "icepop", "correction": {"high": 0.9}}, ["icepop", "low <= 1 <= high"]),
    ({"preset": "mis", "correction": {"low": 1.5}}, ["mis", "low <= 1 <= high"]),
    ({"preset": "grpo-tis", "correction": {"floor": 3.0}}, ["tis", "floor below objective.correction.cap"]),
    ({"preset": "sat-gspo2"}, ["did you mean 'sat-gspo'"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_meaningless_combinations_are_refused_with_reason_and_remedy(changes, words):
    with pytest.raises(ValidationError) as caught:
        objective(**changes)
    message = caught.value.errors()[0]["msg"]
    for word in words:
        assert word in message


def test_a_refusal_reaches_the_user_as_a_sentence():
    with pytest.raises(ConfigError, match=r"^the kernel of 'vespo' is made for .* set objective.unit=product$"):
        build_config({"objective": "vespo"}, ["objective.unit=sequence"])


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "grpo-tis", "anchor": "step_start"},
        {"preset": "sat-gspo", "unit": "product"},
        {"preset": "vaco", "unit": "sequence"},
        {"preset": "sat-grpo", "anchor": "prox_approx"},
        {"preset": "sat-grpo-const", "boundary": {"strength": 1.0}},
        {"preset": "trm", "reject": [{"kind": "trust_region", "max_k2": None}]},
        {"preset": "dppo-tv", "anchor": "old_actor"},
        {"preset": "topr", "unit": "product"},
    ],
)
def test_combinations_that_mean_something_are_allowed(changes):
    allowed = objective(**changes).model_dump()
    for name in changes.keys() & {"preset", "anchor", "unit"}:
        assert allowed[name] == changes[name]
