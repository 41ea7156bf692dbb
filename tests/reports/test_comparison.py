"""Conditions and outcomes, tables and the figures of the paper, against numbers worked out here."""

import csv
import io
import json
import math

import numpy as np
import pytest
from reports.synthetic import make_config, make_evaluation, make_report, sweep_score, write_sweep

from steadyrl.errors import ConfigError
from steadyrl.reports import paper_figures
from steadyrl.reports.comparison import collapsed_at, compare_runs, outcome, read_sweep
from steadyrl.reports.recorder import RunFolder, read_run
from steadyrl.reports.tables import cells_table, csv_text, markdown, pair_table, ranks, score_table

STEPS = 12
T_95 = {1: 12.7062, 2: 4.30265}  # Student's t, from a printed table


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return read_sweep(write_sweep(tmp_path_factory.mktemp("sweep"), seeds=3, steps=STEPS))


def numbers(table):
    return list(csv.DictReader(io.StringIO(csv_text(table.columns, table.numbers))))


def half_width(values):
    return T_95[len(values) - 1] * np.std(values, ddof=1) / math.sqrt(len(values))


def test_rows_columns_and_what_is_not_whole(comparison):
    assert (comparison.row_axis, comparison.rows) == ("method", ["GRPO", "SAT-GRPO"])
    assert (comparison.column_axis, comparison.columns) == ("lag", ["lag 1", "lag 8"])
    assert len(comparison.cells) == 12
    problems = {(cell.row, cell.column, cell.seed): cell.problem for cell in comparison.cells if cell.problem}
    assert problems == {
        ("SAT-GRPO", "lag 8", 1): "stopped at step 6 of 12",
        ("SAT-GRPO", "lag 8", 2): "not started",
    }
    assert [cell.seed for cell in comparison.at("SAT-GRPO", "lag 8")] == [0, 1]
    assert list(comparison.whole("SAT-GRPO", "lag 8")) == [0]


def test_what_a_run_came_to(comparison):
    one = outcome(comparison.whole("GRPO", "lag 1")[1])
    top = sweep_score("GRPO", "1", 1, 1.0)
    assert (one.base, one.best, one.final, one.best_se, one.collapsed_at) == (0.25, top, top, 0.03, None)
    steps = [make_report(step, STEPS, 1, is_sat=False, seed=1).metrics for step in (10, 11, 12)]
    tokens = [metrics["sampled_tokens"] for metrics in steps]
    expected = np.average([metrics["mismatch/d_bar"] for metrics in steps], weights=tokens)
    assert one.d_bar == pytest.approx(expected)


def test_the_best_score_is_one_that_training_reached(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config())
    for step, score in ((0, 0.5), (1, 0.3), (2, 0.2)):
        folder.evaluation(make_evaluation(step, score))
    one = outcome(read_run(folder.path))
    assert (one.base, one.best, one.final) == (0.5, 0.3, 0.2)


def test_a_collapse_is_dated_and_the_best_score_stays(comparison):
    run = comparison.whole("GRPO", "lag 8")[0]
    one = outcome(run)
    # the median of three moves the edge of a fall by no step
    assert collapsed_at(run) == one.collapsed_at == STEPS // 2 + 1
    assert (one.best, one.final) == (sweep_score("GRPO", "8", 0, 0.5), 0.1)


def test_the_score_table_has_means_intervals_and_stars(comparison):
    table = score_table(comparison)
    found = {(row["method"], row["lag"]): row for row in numbers(table)}
    scores = [sweep_score("GRPO", "1", seed, 1.0) for seed in range(3)]
    row = found["GRPO", "lag 1"]
    assert float(row["best score mean"]) == pytest.approx(np.mean(scores))
    assert float(row["best score high"]) - float(row["best score mean"]) == pytest.approx(half_width(scores), rel=1e-4)
    assert (found["GRPO", "lag 8"]["seeds"], found["GRPO", "lag 8"]["collapsed"]) == ("3", "1")
    assert found["SAT-GRPO", "lag 8"]["best score low"] == ""  # one seed
    assert table.groups == [("", 1), ("best score", 2), ("final score", 2), ("d-bar, last quarter", 2)]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["before training"][:2] == ["0.250", "0.250"]
    assert rows["GRPO"][1].endswith("] * 1/3")
    assert rows["SAT-GRPO"][1] == f"{sweep_score('SAT-GRPO', '8', 0, 1.0):.3f} \u00b1 0.030 (1 seeds)"


def test_pairs_are_compared_on_equal_seeds(comparison):
    found = {(row["row"], row["minus"], row["lag"]): row for row in numbers(pair_table(comparison))}
    assert list(found) == [("SAT-GRPO", "GRPO", "lag 1"), ("SAT-GRPO", "GRPO", "lag 8")]
    row = found["SAT-GRPO", "GRPO", "lag 1"]
    assert (row["seeds"], float(row["best score p"])) == ("3", 0.25)  # three equal signs: 2 of 8 patterns
    assert float(row["best score difference"]) == pytest.approx(0.05)
    assert found["SAT-GRPO", "GRPO", "lag 8"]["seeds"] == "1"


def test_ranks_are_over_the_seeds_that_all_have(comparison):
    found = {(row["method"], row["lag"]): float(row["mean rank"]) for row in numbers(ranks(comparison))}
    assert found["GRPO", "lag 1"] == 2.0
    assert found["SAT-GRPO", "lag 1"] == 1.0


def test_every_run_is_listed(comparison):
    rows = numbers(cells_table(comparison))
    assert [row["state"] for row in rows].count("finished") == 10
    assert [row["collapsed at step"] for row in rows if row["collapsed at step"]] == ["7"]


def test_markdown_escapes_what_would_break_a_table(comparison):
    lines = markdown(score_table(comparison)).splitlines()
    assert lines[0].startswith("| method | best score, lag 1 | best score, lag 8 | final score, lag 1 |")
    assert {line.count(" | ") for line in lines} == {6}
    assert "\\* 1/3" in lines[3]


def test_the_figures_of_the_paper_hold_every_seed(comparison):
    (lag_1, lag_8) = paper_figures.scores(comparison)
    assert (lag_1.name, lag_8.name) == ("figure-3-score-lag-1", "figure-3-score-lag-8")
    assert len(lag_1.rows) == 2 * 3 * (STEPS + 1)
    assert ("GRPO", "lag 1", 2, STEPS, sweep_score("GRPO", "1", 2, 1.0)) in lag_1.rows
    crosses = [line.get_xdata() for line in lag_8.figure.axes[0].lines if line.get_marker() == "X"]
    assert np.concatenate(crosses).tolist() == [STEPS // 2 + 1]
    means = [line for line in lag_1.figure.axes[0].lines if line.get_linewidth() == 1.9]
    expected = [
        np.mean([sweep_score("GRPO", "1", seed, step / STEPS) for seed in range(3)]) for step in range(1, STEPS)
    ]
    assert means[0].get_ydata()[1:-1] == pytest.approx(expected)
    drift, kl = paper_figures.drift(comparison)
    assert (drift.name, kl.name) == ("figure-2-drift", "figure-2-kl")
    assert [plot.name for plot in paper_figures.drift_by_column(comparison)] == [
        "figure-4-drift-lag-1",
        "figure-4-drift-lag-8",
    ]
    first, *_ = paper_figures.best_scores(comparison).figure.axes[0].patches
    assert first.get_width() == pytest.approx(np.mean([sweep_score("GRPO", "1", seed, 1.0) for seed in range(3)]))


def test_many_conditions_get_a_panel_each(comparison, monkeypatch):
    monkeypatch.setattr(paper_figures, "TOGETHER", 3)
    assert [plot.name for plot in paper_figures.drift(comparison)] == [
        "figure-2-drift-grpo",
        "figure-2-kl-grpo",
        "figure-2-drift-sat-grpo",
        "figure-2-kl-sat-grpo",
    ]


def test_axes_of_any_name_and_a_single_axis(tmp_path):
    axes = {"pipeline.lag": ["8"], "objective.boundary.high": ["0.1", "0.2"], "method": ["A"]}
    labels = [{"pipeline.lag": "8", "objective.boundary.high": high, "method": "A"} for high in ("0.2", "0.1")]
    cells = [{"labels": label, "seed": 0, "folder": f"runs/{i}"} for i, label in enumerate(labels)]
    (tmp_path / "sweep.json").write_text(json.dumps({"axes": axes, "cells": cells}))
    found = read_sweep(tmp_path)
    assert (found.row_axis, found.columns) == ("method", ["lag 8, high 0.1", "lag 8, high 0.2"])
    assert score_table(found) is None
    cells = [{"labels": {"lag": "8"}, "seed": 0, "folder": "runs/0"}]
    (tmp_path / "sweep.json").write_text(json.dumps({"axes": {"lag": ["8"]}, "cells": cells}))
    found = read_sweep(tmp_path)
    assert (found.rows, found.columns, found.column_axis) == (["8"], [""], "")
    assert cells_table(found).head[:2] == ["lag", "seed"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"axes": {}, "cells": []}', '{"axes": {"a": ["1"]}, "cells": [{"labels": {}, "seed": 0}]}'],
)
def test_a_damaged_index_is_refused(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ConfigError, match="run the sweep again"):
        read_sweep(tmp_path)


def test_runs_named_one_by_one_are_grouped_by_recipe(tmp_path):
    def run(name, preset, lag, seed, high=0.2):
        config = make_config(preset, 4, lag).model_dump()
        config["seed"] = seed
        config["objective"]["boundary"]["high"] = high
        folder = RunFolder.create(tmp_path / name, type(make_config()).model_validate(config))
        folder.evaluation(make_evaluation(4, 0.5))
        return read_run(folder.path)

    runs = [run("a", "grpo", 8, 0), run("b", "grpo", 8, 1), run("c", "grpo", 1, 0), run("d", "grpo", 8, 0, high=0.3)]
    found = compare_runs(runs)
    assert found.rows == ["grpo", "grpo (d)"]
    assert found.columns == ["lag 1", "lag 8"]
    assert [cell.run.name for cell in found.at("grpo", "lag 8")] == ["a", "b"]


def test_streamed_runs_are_told_from_batch_wise_ones_by_their_lag(tmp_path):
    runs = []
    for name, pipeline in (
        ("a", {"regime": "streaming", "max_lag": 8, "lag": 1}),
        ("b", {"regime": "batch", "lag": 8}),
    ):
        folder = RunFolder.create(tmp_path / name, make_config())
        run = read_run(folder.path)
        table = {key: value for key, value in run.config["pipeline"].items() if key not in ("lag", "max_lag")}
        run.config["pipeline"] = {**table, **pipeline}
        runs.append(run)
    found = compare_runs(runs)
    assert found.columns == ["lag 8", "max lag 8"]
    assert found.rows == ["sat-grpo"]
