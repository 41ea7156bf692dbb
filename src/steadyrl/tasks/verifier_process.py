"""The parent's end of one worker: start it, ask it, kill it; every wait has a deadline."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

KILL_TIMEOUT_S = 5.0
MAX_BYTES = 1 << 15  # of requests that wait in a pipe: half of what Linux keeps for its reader, so writing never blocks
WALL_FACTOR = 10
MIN_WAIT_S = 0.05  # between two looks at a worker's clock
BEGIN_TIMEOUT_S = 60.0  # for an idle worker to take an answer, on a machine that is busy with other things


class WorkerTimeout(Exception):
    """The answer took longer than it may."""


class WorkerDied(Exception):
    """The worker ended, or never began, without a verdict."""


class WorkerProcess:
    """A worker process; it belongs to the thread that started it, and only `kill` may be called from another."""

    def __init__(self, command: list[str]) -> None:
        # its own process group: Ctrl-C in a terminal is meant for the trainer
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0
        )
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """
        Raises:
            WorkerDied: it ended, or was not ready in time.
        """
        if self._receive(timeout_s) is None:
            raise WorkerDied(f"a worker was not ready after {timeout_s:.0f} s")

    def send(self, requests: bytes) -> None:
        """Give an idle worker its next lines, at most MAX_BYTES.

        Raises:
            WorkerDied: it has ended.
        """
        assert self._process.stdin is not None
        assert len(requests) <= MAX_BYTES
        try:
            self._process.stdin.write(requests)
        except OSError:
            raise WorkerDied(self._end()) from None

    def reply(self, timeout_s: float) -> dict[str, Any]:
        """The reply to the next line, in `timeout_s` of the processor's time since the worker began with it.

        Not the wall's time: on a busy machine that would time out answers that are right. A worker that
        gets, or takes, no processor is given up after WALL_FACTOR times as long.

        Raises:
            WorkerTimeout: no reply in time; the worker is of no use any more.
            WorkerDied: it ended without a reply.
        """
        begun = self._receive(BEGIN_TIMEOUT_S)
        if begun is None:
            raise WorkerDied(f"a worker did not begin within {BEGIN_TIMEOUT_S:.0f} s")
        wall_end = time.monotonic() + WALL_FACTOR * timeout_s
        left_s = timeout_s
        while left_s > 0 and time.monotonic() < wall_end:
            reply = self._receive(max(left_s, MIN_WAIT_S))
            if reply is not None:
                return reply
            left_s = timeout_s - (processor_s(self.pid) - begun["begun"])
        raise WorkerTimeout(f"it took longer than {timeout_s:g} s")

    def kill(self) -> None:
        """End it at once, stopped or not. Any thread may call it, and more than once."""
        self._process.kill()

    def close(self) -> None:
        """End it and free what it held."""
        self.kill()
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return  # it hangs in the kernel: its pipes are left to it
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, or None where there is none in time.

        Raises:
            WorkerDied: the worker ended.
        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return None
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise WorkerDied(self._end())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _end(self) -> str:
        """How it ended."""
        try:
            code = self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "a worker closed its pipe"
        if code < 0:
            return f"its worker was killed by {signal.Signals(-code).name}"
        return f"its worker ended with exit code {code}"


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used; infinite where there is no /proc to say so."""
    if sys.platform != "linux":
        return math.inf
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
