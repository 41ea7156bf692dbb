"""The pages in a headless Chromium: no script errors, no requests, nothing wider than a phone, every section drawn."""

import pytest
from reports.chromium import BINARY, Chromium
from reports.synthetic import make_config, make_evaluation, make_scored_batch, write_run, write_sweep

from steadyrl.reports.html import write_report
from steadyrl.reports.recorder import RunFolder

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed")

ATTACK = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
HOSTILE = ["</script>", '"\\', "\u202ekcatta", "\0", "\n", "&amp;", "\ud800"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    long_name = "a-run-whose-name-is-longer-than-any-telephone-is-wide-" * 2
    write_run(root / "sat", "sat-grpo", steps=8)
    write_run(root / long_name, "gspo", steps=8, seed=1)
    write_sweep(root / "sweep", seeds=2, steps=8)
    return {
        "a run": write_report([write_hostile(root / "hostile")]),
        "two runs": write_report([root / "sat", root / long_name], root / "both.html"),
        "a sweep": write_report([root / "sweep"]),
    }


def write_hostile(path):
    """A run of what a model could write; one rollout was not trained on."""
    folder = RunFolder.create(path, make_config("sat-grpo"))
    for step, score in ((0, 0.1), (4, 0.2)):
        folder.evaluation(make_evaluation(step, score))
    batch = make_scored_batch(text=ATTACK)
    batch.rollouts[0].consumed = None
    folder.rollouts(batch, lambda token: HOSTILE[token % len(HOSTILE)])
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
@pytest.mark.parametrize("name", ["a run", "two runs", "a sweep"])
def test_a_page_is_sound_at_every_width(browser, pages, name, width, dark):
    browser.open(pages[name], width, dark)
    assert browser.problems == []
    assert browser.requests == [pages[name].resolve().as_uri()]
    assert browser.run("document.documentElement.scrollWidth") <= width
    # every figure has a size, every section that the page names is there and seen
    boxes = browser.run("[...document.querySelectorAll('svg')].map(x => x.getBoundingClientRect().height)")
    assert boxes
    assert min(boxes) > 60
    targets = browser.run("[...document.querySelectorAll('nav a')].map(x => x.getAttribute('href').slice(1))")
    assert len(targets) == browser.run("document.querySelectorAll('h2').length")
    for target in targets:
        assert browser.run(f"document.getElementById('{target}').getBoundingClientRect().height") > 10
    backs = {False: "rgb(255, 255, 255)", True: "rgb(18, 22, 28)"}
    assert browser.run("getComputedStyle(document.body).backgroundColor") == backs[dark]


def test_colours_follow_what_each_rule_did(browser, pages):
    browser.open(pages["two runs"])
    data = "JSON.parse(document.getElementById('rollout-data').textContent).runs[0]"
    rules = browser.run(f"{data}.rules.map(rule => rule.name)")
    shown = browser.run("[...document.getElementById('rollout-colour').options].map(x => x.text)")
    assert shown == ["log-ratio d", "probability under the engine", "lag", *rules]
    last = browser.run(f"{data}.batches.length") - 1
    seen = set()
    for letters in browser.run(f"{data}.batches[{last}].rollouts.map(rollout => rollout.codes)"):
        for rule, of_rule in enumerate(letters):
            choose(browser, "colour", 3 + rule)
            classes = browser.run(
                "[...document.querySelectorAll('#rollout-tokens .token')].map("
                "x => [x.classList.contains('low'), x.classList.contains('high'), x.classList.contains('gated')])"
            )
            assert classes == [[x in "lLm", x in "hHM", x in "gGLHmM"] for x in of_rule]
            seen |= set(of_rule)
        browser.run("document.getElementById('rollout-next').click()")
    assert seen >= set(".lhgG")
    assert browser.problems == []


def test_a_token_that_is_pointed_at_shows_its_numbers(browser, pages):
    browser.open(pages["two runs"])
    choose(browser, "colour", 0)
    browser.run("document.querySelectorAll('#rollout-tokens .token')[2].click()")
    text = browser.run("document.getElementById('rollout-readout').textContent")
    assert "token 3 of" in text
    assert "SAT-GRPO (this run): " in text
    d = browser.run(
        "JSON.parse(document.getElementById('rollout-data').textContent).runs[0].batches.at(-1).rollouts[0].d[2]"
    )
    assert f" d {d:.3g}"[:6] in text
    colour = browser.run("document.querySelectorAll('#rollout-tokens .token')[2].style.background")
    assert colour.startswith("rgba(15, 127, 196" if d < 0 else "rgba(213, 94, 0")
    key = "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})"
    browser.run(f"document.getElementById('rollout-tokens').dispatchEvent({key})")
    assert "token 4 of" in browser.run("document.getElementById('rollout-readout').textContent")


def test_another_run_can_be_chosen(browser, pages):
    browser.open(pages["two runs"])
    choose(browser, "run", 1)
    choose(browser, "batch", 0)
    assert "GSPO clip (this run)" in browser.run("document.getElementById('rollout-colour').textContent")
    assert browser.run("document.querySelectorAll('#rollout-tokens .token').length") > 0
    assert browser.problems == []


def test_what_a_model_wrote_is_text(browser, pages):
    browser.open(pages["a run"])
    assert browser.problems == []
    assert browser.run("window.attacked") is None
    assert browser.run("document.images.length") == 0
    assert "not trained on" in browser.run("document.getElementById('rollout-shown').textContent")
    texts = set()
    for _ in range(12):
        texts |= set(browser.run("[...document.querySelectorAll('#rollout-tokens .token')].map(x => x.textContent)"))
        for mode in range(8):
            choose(browser, "colour", mode)
        browser.run("document.getElementById('rollout-next').click()")
    # control and direction characters are spelled out
    assert {"</script>", '"\\', "\u27e8U+202E\u27e9kcatta", "\u27e8U+0000\u27e9", "\u23ce\n", "&amp;"} <= texts
    assert browser.problems == []


def choose(browser, name, index):
    """As a user does with a <select>."""
    browser.run(
        f"(() => {{ const x = document.getElementById('rollout-{name}'); x.value = {index}; "
        "x.dispatchEvent(new Event('change')); })()"
    )
