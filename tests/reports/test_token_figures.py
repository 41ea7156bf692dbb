"""Which tokens: buckets, labels and signs."""

import math

import numpy as np
import pytest
import torch
from reports.synthetic import make_config, make_report, make_scored_batch

from steadyrl.diagnostics.buckets import by_age, by_position, by_probability
from steadyrl.objective.rule import Layout
from steadyrl.reports.recorder import RunFolder, read_run
from steadyrl.reports.reward_figures import group_means, statuses
from steadyrl.reports.token_figures import bucket_labels, bucket_means, gated_by, gated_by_sign, sides


def test_labels_are_those_that_the_step_statistics_cut_by():
    layout = Layout(torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 1)
    for longest in (1, 2, 3, 32, 33):
        labels = by_position(layout, longest).labels
        assert bucket_labels("position", len(labels)) == list(labels)
    age = by_age(3, torch.tensor([1]), layout.loss_mask, 4)
    assert bucket_labels("age", len(age.labels)) == list(age.labels)
    starts = [label.removeprefix("[").split(",")[0] for label in by_probability(torch.zeros(1)).labels]
    assert bucket_labels("probability", len(starts)) == starts


def test_bucket_means_are_over_the_last_quarter_without_gaps(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config())
    for step in range(1, 9):
        report = make_report(step, 8)
        report.histograms["gated_by_age"] = [float(step), math.nan if step == 8 else 2.0, math.nan]
        folder.step(report)
    means = bucket_means(read_run(folder.path), "gated_by_age")
    assert means[:2] == [7.5, 2.0]
    assert math.isnan(means[2])
    plot = gated_by([read_run(folder.path)], "age")
    assert [row[:3] for row in plot.rows][:2] == [("run", "0", 7.5), ("run", "1", 2.0)]


def test_signs_of_gated_tokens_are_counted_over_the_recorded_batches(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config("sat-grpo"))
    counts, total = np.zeros((2, 2)), 0
    for number in (0, 1):
        batch = make_scored_batch(number, groups=5)
        batch.rollouts[0].consumed = None
        folder.rollouts(batch, str)
        scored = batch.rollouts[1:]
        d = [(r.consumed.trainer_logp - r.behavior_logp)[2:] for r in scored]
        sizes = np.sort(np.abs(np.concatenate(d)))
        q = sizes[math.ceil(0.9 * len(sizes)) - 1]
        total += len(sizes)
        for rollout, drift in zip(scored, d, strict=True):
            for side, sign in ((0, -1), (1, 1)):
                counts[side, int(rollout.consumed.advantage > 0)] += (drift * sign > q).sum()
    plot = gated_by_sign([read_run(folder.path)])
    assert [row[1] for row in plot.rows] == ["r < 1, A < 0", "r < 1, A > 0", "r > 1, A < 0", "r > 1, A > 0"]
    assert [row[2] for row in plot.rows] == pytest.approx((counts / total).flatten().tolist())


def test_a_run_without_sat_has_no_signs_of_it(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config("grpo"))
    folder.rollouts(make_scored_batch(), str)
    assert gated_by_sign([read_run(folder.path)]) is None


def test_sides_are_means_over_the_run(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config())
    folder.step(make_report(1))
    rows = sides([read_run(folder.path)]).rows
    assert [row[2] for row in rows] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert [row[3] for row in rows] == pytest.approx([0.01, 0.0, 0.0, 0.04])


def test_groups_are_counted_by_their_mean_reward(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config())
    batch = make_scored_batch(3)
    for rollout in batch.rollouts[:4]:
        rollout.reward = 1.0
    batch.rollouts[4].reward = float("nan")
    folder.rollouts(batch, str)
    rows = group_means([read_run(folder.path)]).rows
    counts = {(low, high): count for _, _, low, high, count in rows if count}
    # means 1, 1/3 and 1/2
    assert counts == {(0.25, 0.375): 1, (0.5, 0.625): 1, (0.875, 1.0): 1}


def test_verdicts_are_stacked_and_sum_to_one(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config())
    for step in (1, 2):
        folder.step(make_report(step))
    plot = statuses([read_run(folder.path)])
    assert plot.columns == ("run", "step", "right", "wrong", "unparsable", "truncated", "timeout", "error")
    for row in plot.rows:
        assert sum(share for share in row[2:] if share is not None) == pytest.approx(1.0)
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in plot.figure.axes[0].collections]
    assert tops[-1] == pytest.approx(1.0)
