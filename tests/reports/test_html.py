import re
import sys
import xml.etree.ElementTree

import numpy as np
import pytest
from reports.synthetic import make_config, make_report, write_run

from steadyrl.errors import ConfigError
from steadyrl.reports.canvas import running_mean
from steadyrl.reports.html import write_report
from steadyrl.reports.recorder import RunFolder

ATTACK = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "sat", "sat-grpo", steps=10, text=ATTACK)
    write_run(root / "plain", "grpo", steps=10, seed=1)
    return root


@pytest.fixture(scope="module")
def page(folders):
    return write_report([folders / "sat"]).read_text()


@pytest.fixture(scope="module")
def overlay(folders):
    return write_report([folders / "sat", folders / "plain"], folders / "new" / "both.html").read_text()


def svgs(html):
    return re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)


def test_the_report_of_one_run_lies_in_its_folder(folders, page):
    assert (folders / "sat" / "report.html").read_text() == page
    assert "0.120 \u00b1 0.030 to 0.620 \u00b1 0.030" in page
    assert "at most 4 optimizer steps old" in page
    assert "2,816 generated = 2,560 trained + 0 dropped + 256 buffered" in page
    assert len(svgs(page)) == 8


def test_model_output_comes_out_escaped(page):
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(" in page


def test_the_page_needs_no_network(page):
    addresses = set(re.findall(r"https?://[^\"' )]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


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


def test_several_runs_are_laid_over_each_other(overlay):
    reward, *_ = svgs(overlay)
    assert ">sat<" in reward
    assert ">plain<" in reward
    assert "<th>method</th>" in overlay


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


def test_an_empty_run_beside_a_full_one(folders, tmp_path):
    RunFolder.create(tmp_path / "empty", make_config())
    page = write_report([tmp_path / "empty", folders / "plain"], tmp_path / "out.html").read_text(encoding="utf-8")
    assert "empty" in page
    assert "plain" in page
    assert "<svg" in page


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


def test_wrong_calls_say_what_to_do(folders):
    with pytest.raises(ConfigError, match="--out"):
        write_report([folders / "sat", folders / "plain"])
    with pytest.raises(ConfigError, match="named twice"):
        write_report([folders / "sat", folders / "sat"], folders / "x.html")
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_report([folders])


@pytest.mark.parametrize("out", ["", "sat", "sat/config.toml/x.html", "a\0b", "n" * 300])
def test_a_page_that_cannot_be_written_is_refused(folders, out):
    with pytest.raises(ConfigError, match="--out"):
        write_report([folders / "plain"], folders / out)


def test_a_response_that_is_no_valid_text_and_a_stray_file_do_no_harm(tmp_path):
    write_run(tmp_path / "run", "grpo", steps=3, text="\ud800")
    (tmp_path / "run" / "rollouts" / "batch_copy.jsonl").write_text("")
    page = write_report([tmp_path / "run"]).read_text(encoding="utf-8")
    assert "batch_copy" not in page
    assert "First recorded batch" in page


def test_without_matplotlib_the_remedy_is_named(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "steadyrl\[report\]"'):
        write_report([folders / "sat"])


def test_running_mean_keeps_a_constant_and_the_length_and_skips_gaps():
    series = np.full(100, 3.0)
    series[[4, 50]] = np.nan
    assert running_mean(series) == pytest.approx(np.full(100, 3.0))
    assert running_mean(np.arange(5.0)) == pytest.approx(np.arange(5.0))
