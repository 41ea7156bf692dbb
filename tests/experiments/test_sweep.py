"""Sweeps over runs of two optimizer steps: they go on after a kill, and a failed run is a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steadyrl.errors import ConfigError
from steadyrl.experiments.display import headline
from steadyrl.experiments.grid import Grid, load_grid
from steadyrl.experiments.sweep import SweepState, run_sweep
from steadyrl.reports.recorder import read_run

SMOKE = Path(__file__).parents[2] / "recipes" / "smoke.toml"
GRID = f"""
recipe = {json.dumps(str(SMOKE))}
out = "unused"
seeds = 2
[set]
"evaluation.prompts" = 2
"record.rollouts_every_batches" = 0
[axes.method]
"GRPO" = {{ objective = "grpo", "model.routing_replay" = false }}
"broken" = {{ objective = "grpo", "trainer.lr" = 1e38 }}
"""


class Told:
    def __init__(self) -> None:
        self.headlines: list[str] = []

    def update(self, state: SweepState) -> None:
        self.headlines.append(headline(state))


def make_grid(folder: Path, text: str = GRID) -> Grid:
    folder.mkdir(exist_ok=True)
    (folder / "grid.toml").write_text(text)
    return load_grid(folder / "grid.toml", out=folder / "out")


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[Grid, SweepState, Told]:
    grid, told = make_grid(tmp_path_factory.mktemp("sweep")), Told()
    return grid, run_sweep(grid, 2, told), told


def test_every_run_is_made_and_a_failure_does_not_stop_the_others(swept):
    grid, state, told = swept
    assert (state.finished, sorted(state.failed)) == (2, ["broken_seed0", "broken_seed1"])
    assert "lower trainer.lr" in state.failed["broken_seed0"].lower()
    for cell in grid.cells:
        assert read_run(cell.config.run_dir).status["state"] == ("failed" if "broken" in cell.name else "finished")
    assert told.headlines[-1] == "4 of 4 runs, 2 failed"
    assert "training grpo" in (grid.out / "logs" / "grpo_seed0.log").read_text()


def test_the_index_is_beside_the_runs(swept):
    grid, _, _ = swept
    index = json.loads((grid.out / "sweep.json").read_text())
    assert index == grid.index()
    assert all((grid.out / cell["folder"] / "config.toml").exists() for cell in index["cells"])


def test_runs_of_one_seed_pair_up(swept):
    """The same prompts for every method; another seed has others."""
    grid, _, _ = swept
    rows = {cell.name: read_run(cell.config.run_dir).evaluations[0] for cell in grid.cells}
    assert rows["grpo_seed0"]["seed"] == rows["broken_seed0"]["seed"] != rows["grpo_seed1"]["seed"]


def test_what_is_finished_is_not_run_again(swept):
    grid, _, _ = swept
    metrics = Path(grid.cells[0].config.run_dir) / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    only = Grid(grid.recipe, grid.out, grid.axes, grid.seeds, [cell for cell in grid.cells if "grpo" in cell.name])
    told = Told()
    state = run_sweep(only, 2, told)
    assert (state.kept, state.finished, told.headlines[-1]) == (2, 0, "2 of 2 runs, 2 of them from before")
    assert metrics.stat().st_mtime_ns == before


def test_a_run_with_other_settings_is_never_taken_for_one_of_the_grid(swept):
    grid, _, _ = swept
    other = make_grid(grid.out.parent, GRID.replace('"evaluation.prompts" = 2', '"evaluation.prompts" = 3'))
    with pytest.raises(ConfigError, match=r"grpo_seed0 was run with other settings .* --out"):
        run_sweep(other, 1, Told())


def test_a_killed_sweep_leaves_no_process_and_goes_on(tmp_path):
    grid = make_grid(tmp_path, GRID.replace("[set]", '[set]\n"trainer.steps" = 400').replace('"broken"', '#"broken"'))
    command = [sys.executable, "-c", "from steadyrl.cli import main; main()"]
    arguments = ["sweep", str(tmp_path / "grid.toml"), "--out", str(grid.out), "--jobs", "1"]
    sweep = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL)
    metrics = Path(grid.cells[0].config.run_dir) / "metrics.jsonl"
    try:
        _until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2, "the first run trains")
        with pytest.raises(ConfigError, match="another process is writing"):
            run_sweep(grid, 1, Told())
    finally:
        sweep.send_signal(signal.SIGKILL)
        sweep.wait(timeout=60)
    _until(lambda: not _processes_with(str(tmp_path)), "its run ends with it")
    size = metrics.stat().st_size
    short = make_grid(tmp_path, GRID.replace('"broken"', '#"broken"'))
    state = run_sweep(short, 2, Told())
    assert (state.kept, state.finished) == (0, 2)
    assert metrics.stat().st_size != size
    assert len(read_run(short.cells[0].config.run_dir).steps) == 2


def _processes_with(word: str) -> list[int]:
    """Processes that hold a file whose path has a word in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            holds = any(word in os.readlink(link) for link in (process / "fd").iterdir())
            if holds and int(process.name) != os.getpid():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def _until(condition, what: str, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s until {what}"
        time.sleep(0.1)
