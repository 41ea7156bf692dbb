"""The page as text; tests/reports/test_browser.py opens it in a browser."""

import csv
import json
import re
import sys
import xml.etree.ElementTree

import numpy as np
import pytest
from reports.synthetic import make_config, make_report, write_run, write_sweep

from steadyrl.errors import ConfigError
from steadyrl.reports.canvas import running_mean
from steadyrl.reports.html import write_report
from steadyrl.reports.recorder import RunFolder, read_run
from steadyrl.reports.sections import PLAN

ATTACK = "</pre></script><script>alert('x')</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "sat", "sat-grpo", steps=10, text=ATTACK)
    write_run(root / "plain", "grpo", steps=10, seed=1)
    return root


@pytest.fixture(scope="module")
def page(folders):
    return write_report([folders / "sat"], export=folders / "export").read_text()


@pytest.fixture(scope="module")
def overlay(folders):
    return write_report([folders / "sat", folders / "plain"], folders / "new" / "both.html").read_text()


def svgs(html):
    return re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)


def headings(html):
    return re.findall(r"<h2[^>]*>(.*?)</h2>", html)


def embedded(html):
    """The rollouts that the page holds."""
    (text,) = re.findall(r'<script type="application/json" id="rollout-data">(.*?)</script>', html, flags=re.DOTALL)
    return json.loads(text)


def read_csv(file):
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_the_report_of_one_run_lies_in_its_folder(folders, page):
    assert (folders / "sat" / "report.html").read_text() == page
    assert "0.120 \u00b1 0.030 to 0.620 \u00b1 0.030" in page
    assert "at most 4 optimizer steps old" in page
    assert "2,816 generated = 2,560 trained + 0 dropped + 256 buffered" in page


def test_every_section_has_a_figure(page):
    parts = re.split(r"<h2[^>]*>", page)[1:]
    assert [part.split("</h2>")[0] for part in parts] == [
        "Score",
        "Drift between trainer and engine",
        *(title for title, *_ in PLAN),
        "Where the responses went",
        "Rollouts",
        "Configuration",
    ]
    assert ["<svg" in part for part in parts] == [True] * (2 + len(PLAN)) + [False] * 3


def test_model_output_comes_out_escaped(page):
    assert page.count("<script") == 2  # the data and the browser of rollouts
    assert "<img" not in page
    texts = [
        token for batch in embedded(page)["runs"][0]["batches"] for r in batch["rollouts"] for token in r["tokens"]
    ]
    assert ATTACK[:40] in texts


def test_the_page_needs_no_network_and_allows_none(page):
    addresses = set(re.findall(r"https?://[^\"' )]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "default-src 'none'" in page


def test_figures_are_sound_xml_and_follow_the_colours_of_the_page(page):
    for svg in svgs(page):
        xml.etree.ElementTree.fromstring(svg)
        assert "currentColor" in svg
        assert "#123456" not in svg


def test_ids_are_unique_on_the_page_and_every_reference_has_its_target(overlay):
    ids = re.findall(r'\bid="([^"]*)"', overlay)
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:url\(#|href="#)([^)"]*)', overlay)
    assert references
    assert set(references) <= set(ids)


def test_several_runs_are_laid_over_each_other_and_compared(overlay):
    assert headings(overlay)[:3] == ["Runs", "Scores by method and lag", "Compared on equal seeds"]
    (reward,) = [svg for svg in svgs(overlay) if 'id="reward"' in svg]
    assert ">sat<" in reward
    assert ">plain<" in reward
    assert "<th>method</th>" in overlay
    assert [run["name"] for run in embedded(overlay)["runs"]] == ["sat", "plain"]


def test_a_sweep_has_its_own_page(tmp_path):
    folder = write_sweep(tmp_path / "grid", seeds=2, steps=8)
    page = write_report([folder], export=tmp_path / "export").read_text()
    assert headings(page) == [
        "Scores by condition",
        "Best score",
        "Compared on equal seeds",
        "Score over training",
        "Drift over training: the lags against each other",
        "Drift over training: the methods against each other",
        "Runs",
        "Configuration",
    ]
    assert "7 of 8 runs are finished" in page
    assert "1 of 8 runs are missing, unfinished or failed" in page
    assert "stopped at step 4 of 8" in page
    assert "1/2" in page  # the collapse
    table = (tmp_path / "export" / "table-1.md").read_text()
    assert "| method | best score, lag 1 | best score, lag 8 |" in table
    with pytest.raises(ConfigError, match="report on it alone"):
        write_report([folder, folder / "runs" / "grpo_lag-1_seed0"], tmp_path / "x.html")


def test_every_figure_is_exported_with_its_numbers(folders, page):
    names = set(re.findall(r'<svg id="([^"]*)"', page))
    files = {file.name for file in (folders / "export").iterdir()}
    assert files == {f"{name}.{kind}" for name in names for kind in ("png", "csv")}
    steps = read_run(folders / "sat").steps
    rows = read_csv(folders / "export" / "reward.csv")
    assert [float(row["reward/mean"]) for row in rows] == [row["metrics"]["reward/mean"] for row in steps]
    rows = read_csv(folders / "export" / "lags.csv")
    totals = np.sum([row["histograms"]["lag"] for row in steps], axis=0)
    assert [float(row["tokens"]) for row in rows] == totals.tolist()
    budget = read_csv(folders / "export" / "time-budget.csv")
    events = read_run(folders / "sat").timeline
    trained = sum(event["end_s"] - event["start_s"] for event in events if event["phase"] == "train")
    (row,) = [row for row in budget if row["phase"] == "train"]
    assert float(row["seconds"]) == pytest.approx(trained)
    total = sum(float(row["seconds"]) for row in budget if row["actor"] == "trainer")
    assert total == pytest.approx(max(event["end_s"] for event in events))
    for name in names:
        assert (folders / "export" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_sat_and_without_evaluations_leaves_those_out(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config("grpo"))
    folder.step(make_report(1, is_sat=False))
    html = write_report([folder.path]).read_text()
    assert "There is no evaluation yet." in html
    assert "No run here uses a Staleness-Adaptive Trust Region." in html
    assert "No timeline was recorded." in html
    assert "No responses were recorded" in html


def test_a_run_that_has_only_begun_still_has_a_page(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config())
    assert svgs(write_report([folder.path]).read_text()) == []


def test_an_empty_run_beside_another_and_a_name_with_markup(tmp_path):
    RunFolder.create(tmp_path / "<b>$x$&", make_config())
    beside = RunFolder.create(tmp_path / "beside", make_config())
    beside.event("trainer", "train", 0.0, 1.0, 1)
    page = write_report([tmp_path / "<b>$x$&", beside.path], tmp_path / "out.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;$x$&amp;" in page
    assert "<b>$x$&" not in page
    assert svgs(page)
    for svg in svgs(page):
        xml.etree.ElementTree.fromstring(svg)


def test_metrics_of_nothing_but_nan(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config())
    report = make_report(1)
    for name in report.metrics:
        report.metrics[name] = float("nan")
    folder.step(report)
    assert "Not counted." in write_report([folder.path]).read_text()


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path):
    for parent in ("lag1", "lag8"):
        RunFolder.create(tmp_path / parent / "seed0", make_config())
    html = write_report([tmp_path / "lag1" / "seed0", tmp_path / "lag8" / "seed0"], tmp_path / "out.html").read_text()
    assert "<td>lag1/seed0</td>" in html


def test_wrong_calls_say_what_to_do(folders, tmp_path):
    with pytest.raises(ConfigError, match="--out"):
        write_report([folders / "sat", folders / "plain"])
    with pytest.raises(ConfigError, match="named twice"):
        write_report([folders / "sat", folders / "sat"], folders / "x.html")
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_report([folders])
    RunFolder.create(tmp_path / "run", make_config())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--export"):
        write_report([tmp_path / "run"], export=tmp_path / "file")


@pytest.mark.parametrize("out", ["", "sub", "file/x.html", "a\0b", "n" * 300])
def test_a_page_that_cannot_be_written_is_refused(tmp_path, out):
    RunFolder.create(tmp_path / "run", make_config())
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        write_report([tmp_path / "run"], tmp_path / out)


def test_without_matplotlib_the_remedy_is_named(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "steadyrl\[report\]"'):
        write_report([folders / "sat"])


def test_running_mean_keeps_a_constant_and_the_length_and_skips_gaps():
    series = np.full(100, 3.0)
    series[[4, 50]] = np.nan
    assert running_mean(series) == pytest.approx(np.full(100, 3.0))
    assert running_mean(np.arange(5.0)) == pytest.approx(np.arange(5.0))
