"""The end of the command: its exit code, and that nothing keeps the process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HANGS = """
import sys, threading
from steadyrl import cli
cli.LEAVE_S = 1.0
threading.Thread(target=threading.Event().wait, name="a-library").start()
cli.entry()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["methods"], 0), (["eval"], 2), (["no-such-command"], 2)])
def test_a_thread_that_never_ends_does_not_keep_the_process(arguments, code):
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    assert "left without waiting longer than 1 s for " in done.stderr
    assert "a-library" in done.stderr
    assert time.monotonic() - start < 100


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "steadyrl", "methods"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "sat-gspo" in done.stdout
