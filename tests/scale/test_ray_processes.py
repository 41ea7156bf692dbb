"""A run that starts a Ray cluster of its own leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scale.ray_runs import RECIPE, SIZES, descendants, eventually, rows

pytest.importorskip("ray")


@pytest.fixture
def home(tmp_path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def start(folder: Path, home: Path, *settings: str) -> subprocess.Popen[str]:
    code = "from steadyrl.cli import main; main()"
    words = [sys.executable, "-c", code, "train", str(RECIPE), *SIZES, *settings, f"run_dir={folder}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(home), "MPLCONFIGDIR": str(home.parent)}  # the figures' fonts are no secret
    return subprocess.Popen(
        [*words, "pipeline.backend=ray"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def steps_done(folder: Path) -> int:
    return len(rows(folder)) if (folder / "metrics.jsonl").exists() else 0


def leaves_nothing(processes: dict[int, str], before: set[str]) -> None:
    """None of these processes lives, and there is no shared memory that was not there before."""
    # Ray's own agents ask their dead cluster for a minute before they leave
    eventually(lambda: not [one for one in processes if Path(f"/proc/{one}").exists()], "all processes are gone", 120)
    assert {name for name in os.listdir("/dev/shm") if "plasma" in name} <= before


def ctrl_c(process: int) -> None:
    os.killpg(process, signal.SIGINT)  # a terminal sends it to everyone


@pytest.mark.parametrize(
    ("end", "is_polite"),
    [
        (lambda process: os.kill(process, signal.SIGKILL), False),
        (lambda process: os.kill(process, signal.SIGTERM), True),
        (ctrl_c, True),
    ],
    ids=["SIGKILL", "SIGTERM", "Ctrl-C"],
)
def test_a_driver_that_is_ended_takes_its_cluster_along(tmp_path, home, end, is_polite):
    before = set(os.listdir("/dev/shm"))
    driver = start(tmp_path / "run", home, "trainer.steps=1000")
    try:
        eventually(lambda: steps_done(tmp_path / "run") >= 2 or driver.poll() is not None, "it trains", 240)
        processes = descendants(driver.pid)
        kinds = {name.split(".")[0].split()[0] for name in processes.values() if name.startswith("ray::")}
        assert {"ray::EngineActor", "ray::RankActor"} <= kinds
        folder = Path(re.findall(r"/tmp/steadyrl-ray-\w+", " ".join(processes.values()))[0])
        end(driver.pid)
        output, _ = driver.communicate(timeout=120)
    finally:
        driver.kill()
    if is_polite:
        assert driver.returncode == 0, output
        assert "continue with" in output
        assert not folder.exists()
    leaves_nothing(processes, before)
    shutil.rmtree(folder, ignore_errors=True)  # of a driver that was killed: its logs
    assert list(home.iterdir()) == []  # no token, no settings
