import re
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from steadyrl import axes as design
from steadyrl.cli import app
from steadyrl.diagnostics import mismatch, split
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import policy_loss
from steadyrl.objective.rule import Layout
from steadyrl.presets import PRESETS
from steadyrl.reports import method_figures, methods
from steadyrl.types import BatchCounts

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "objectives.md").read_text(encoding="utf-8")


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


ROWS = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", section("The presets"), flags=re.MULTILINE))
EXPLAINED = set(re.findall(r"`([a-z0-9]+/[a-z0-9_.]+)`", section("What is logged")))


def members(axis):
    """The names of an annotated union of tables, under its discriminator."""
    union, field = get_args(axis)
    return {get_args(part.model_fields[field.discriminator].annotation)[0] for part in get_args(union)}


# ---- docs/objectives.md ----


def test_the_page_has_one_row_for_every_preset():
    assert set(ROWS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_says_our_variant_where_the_table_does(name):
    assert ("our variant" in ROWS[name]) == bool(methods.variants(ObjectiveConfig.model_validate(name)))


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_names_the_needs(name):
    objective = ObjectiveConfig.model_validate(name)
    letters = {"rollout log-probs": "R", "trainer recompute": "T", "versions": "V", "distributions": "P"}
    letters["distributions (top 20)"] = "K"
    wanted = {letters[need] for need in methods.needs(objective)} | {"R"}
    assert set(ROWS[name].split(" | ")[2].split(" (")[0].split(", ")) == wanted


def loss_metrics(objective):
    """The names that `policy_loss` writes."""
    logp = torch.full((4,), -1.0, requires_grad=True)
    output = policy_loss(
        objective,
        logp=logp,
        behavior_logp=torch.full((4,), -1.1),
        old_logp=torch.full((4,), -1.05),
        reference_logp=torch.full((4,), -1.2),
        advantage=torch.ones(4),
        age=torch.ones(4, dtype=torch.int64),
        divergence=torch.zeros(4),
        layout=Layout(torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1]), 2),
        counts=BatchCounts(4, 2),
    )
    return set(output.sums) | set(output.extremes)


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_explains_every_metric_of_the_loss(name):
    found = loss_metrics(ObjectiveConfig.model_validate(name))
    assert "objective/surrogate" in found
    assert found <= EXPLAINED


def test_the_page_explains_every_metric_of_the_mismatch():
    logp, mask = torch.tensor([-1.0, -2.0]), torch.ones(2, dtype=torch.bool)
    layout = Layout(mask, torch.tensor([0, 1]), 2)
    names = {*mismatch.mismatch_sums(logp, logp, mask), *mismatch.sequence_sums(logp, logp, layout)}
    names |= set(mismatch.abs_quantiles(logp, logp, mask))
    means = dict.fromkeys([*names, *split.split_sums(logp, logp, logp, mask)], 1.0)
    names = {*means, *mismatch.derived(means), *split.split_derived(means)}
    assert names <= EXPLAINED


def test_the_figures_of_the_page_are_there():
    names = re.findall(r"\]\((figures/[a-z0-9.-]+)\)", PAGE)
    assert len(names) >= 4
    for name in names:
        xml.etree.ElementTree.fromstring((DOCS / name).read_text(encoding="utf-8"))


# ---- the table ----


def test_the_facts_cover_every_rule():
    assert set(methods.RULES) == members(design.Boundary)
    assert set(methods.CORRECTIONS) == members(design.Correction)
    assert set(methods.REJECTIONS) == members(design.Rejection)


def test_the_table_follows_the_values():
    changed = methods.method(ObjectiveConfig.model_validate({"preset": "dapo", "boundary": {"high": 0.5}}))
    assert changed.constraint == "r in [0.8, 1.5]"
    assert methods.method(ObjectiveConfig.model_validate("gspo-published")).constraint == "rho in [0.9997, 1.0004]"
    corrected = methods.method(ObjectiveConfig.model_validate("grpo-seq-tis"))
    assert (corrected.constraint, corrected.weight) == ("r in [0.8, 1.2]; K <= 2", "(r or 0) * min(K, 2)")


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("grpo", ["rollout log-probs"]),
        ("sat-gspo-tis", ["rollout log-probs", "trainer recompute"]),
        ("a3po", ["rollout log-probs", "versions"]),
        ("trpo", ["rollout log-probs", "distributions"]),
        ("dppo-topk-kl", ["rollout log-probs", "distributions (top 20)"]),
    ],
)
def test_needs(name, needs):
    assert methods.needs(ObjectiveConfig.model_validate(name)) == needs


def test_an_anchor_of_the_trainer_alone_needs_no_engine():
    assert methods.needs(ObjectiveConfig(anchor="old_actor")) == ["trainer recompute"]


def test_the_command_prints_every_name(monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    result = CliRunner().invoke(app, ["methods"])
    assert result.exit_code == 0
    for name in PRESETS:
        assert re.search(rf"^\W*{name}\*?\s", result.output, flags=re.MULTILINE), name
    for row in methods.methods():
        assert "" not in (row.unit, row.anchor, row.discriminator, row.constraint, row.weight, row.needs, row.source)


# ---- the figures ----


def picture(name):
    return next(picture for picture in method_figures.PICTURES if picture.name == name)


def stops(name, sign, setting=0):
    """The ratios at which the gradient weight of a picture switches between 0 and something."""
    drawn = picture(name)
    chosen = drawn.settings[setting]
    ratio = np.linspace(max(drawn.span[0], 0.01), min(drawn.span[1], 0.999 / chosen.p0), 4001)
    kept = method_figures.evaluate(drawn, chosen, ratio, sign).coefficient.numpy() != 0
    return ratio[1:][kept[1:] != kept[:-1]]


def test_every_rule_has_a_picture():
    assert {picture.rule.rule for picture in method_figures.PICTURES} == members(design.Boundary)
    kernels = {picture.rule.kernel for picture in method_figures.PICTURES if picture.rule.rule == "sat"}
    assert kernels == set(get_args(design.SatBoundary.model_fields["kernel"].annotation))


@pytest.mark.parametrize(
    ("name", "sign", "setting", "edges"),
    [
        ("clip", 1.0, 0, [1.2]),
        ("clip", -1.0, 0, [0.8]),
        ("sat", 1.0, 1, [np.exp(0.0397)]),  # q = 0.02
        ("sat", -1.0, 1, [np.exp(-0.0403)]),
        ("sat", 1.0, 2, [np.exp(0.0867)]),  # q = 0.08: u^3 is about eps q^2
        ("dppo-tv", 1.0, 0, [1 + 0.15 / 0.2]),
        ("dppo-tv", -1.0, 1, [1 - 0.15 / 0.5]),
        ("ipo", 1.0, 1, [0.8, 1.2]),
        ("trpo", 1.0, 0, []),
        ("trpo", 1.0, 1, [1.0]),
        ("unbounded_positive", 1.0, 0, []),
        ("unbounded_positive", -1.0, 0, [0.8]),
    ],
)
def test_curves_end_where_the_formula_says(name, sign, setting, edges):
    np.testing.assert_allclose(stops(name, sign, setting), edges, atol=2e-3)


def test_the_surrogate_of_a_weight_has_its_slope():
    drawn = picture("dppo-tv")
    ratio = np.linspace(0.5, 1.9, 2001)
    values = method_figures.curve_values(drawn, drawn.settings[1], ratio, 1.0)
    np.testing.assert_allclose(values, np.minimum(ratio, 1.3), atol=1e-3)


def test_m2po_is_narrower_in_a_batch_that_drifts():
    calm, stormy = stops("m2po", 1.0, 0), stops("m2po", 1.0, 2)
    assert calm[-1] > stormy[-1] > 1 > stormy[0] > calm[0]


def test_the_command_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(method_figures, "PICTURES", (picture("sat"),))
    monkeypatch.setattr(method_figures, "OVERVIEW", (picture("sat"),))
    monkeypatch.setattr(method_figures, "PAPER", ("sat",))
    result = CliRunner().invoke(app, ["methods", "--plot", str(tmp_path / "figures")])
    assert result.exit_code == 0
    assert "8 files" in result.output
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"overview.svg", "overview.png", "paper-figure-8.svg", "paper-figure-9.png", "rule-sat.svg"} <= names
    for path in (tmp_path / "figures").glob("*.svg"):
        xml.etree.ElementTree.fromstring(path.read_text(encoding="utf-8"))


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="not a folder"):
        methods.draw(tmp_path / "taken")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"steadyrl\[report\]"):
        methods.draw(tmp_path)
