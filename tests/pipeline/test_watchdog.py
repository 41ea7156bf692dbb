"""The watchdog speaks once for each silence, and says where every thread is."""

from __future__ import annotations

import threading
import time

from steadyrl.pipeline.watchdog import Watchdog


def wait_here_for_the_test(event: threading.Event) -> None:
    event.wait(30)


def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_silence_is_reported_once_with_the_state_and_every_thread(tmp_path):
    told: list[str] = []
    event = threading.Event()
    waiting = threading.Thread(target=wait_here_for_the_test, args=(event,))
    waiting.start()
    with Watchdog(tmp_path / "stalled.txt", 0.1, told.append) as watchdog:
        watchdog.describe_with(lambda: "3 groups in flight")
        until(lambda: told)
        time.sleep(0.3)
        assert len(told) == 1
        watchdog.progress()
        until(lambda: len(told) == 2)
    event.set()
    waiting.join()
    assert "3 groups in flight; what every thread does is in" in told[0]
    text = (tmp_path / "stalled.txt").read_text()
    assert text.count("3 groups in flight") == 2
    assert "wait_here_for_the_test" in text


def test_without_a_silence_it_says_nothing(tmp_path):
    told: list[str] = []
    with Watchdog(tmp_path / "stalled.txt", 5.0, told.append) as watchdog:
        for _ in range(5):
            watchdog.progress()
            time.sleep(0.02)
    assert not told
    assert not (tmp_path / "stalled.txt").exists()
