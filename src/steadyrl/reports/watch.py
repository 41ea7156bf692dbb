"""`steadyrl watch`: the report of a run as a live page, served to this machine alone.

The page is built anew only when files of the run have changed and somebody looks. Building takes at most a fifth of one
core's time, and gives way to training. A run is only ever read.
"""

from __future__ import annotations

import json
import os
import re
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from steadyrl.errors import ConfigError, SteadyRLError
from steadyrl.reports.html import write_report
from steadyrl.reports.recorder import CONFIG, EVALUATIONS, METRICS, ROLLOUTS, STATUS, TIMELINE, RunData, read_run

HOST = "127.0.0.1"
REBUILD_S = 3.0  # between two builds at least,
SHARE = 4  # and at least so many times the processor seconds that the last build took
NICENESS = 10  # of the process: training on the same cores goes first
LONGEST_REASON = 300  # characters
SCRIPT = Path(__file__).with_name("watch.js")
# the report's own policy is a tag, and a header cannot widen it
POLICY_TAG = re.compile(r'<meta http-equiv="Content-Security-Policy" content="[^"]*?script-src ([^";]*)[^"]*">')
STATE_LINE = """
<p id="watch-state" role="status" aria-live="off" data-page="{number}"></p>
<p id="watch-reload" hidden>More rollouts were recorded: <a href="/">load the page anew</a> to read them.</p>
<style>
#watch-state, #watch-reload {{ position: fixed; right: 0; bottom: 0; margin: 0; padding: .3rem .8rem; z-index: 1;
  border: 1px solid; background: Canvas; color: CanvasText; font-size: .85rem; }}
#watch-reload {{ bottom: 2.4rem; }}
</style>
<script src="/watch.js"></script>
"""


def watch(folder: Path | str, port: int, announce: Callable[[str], None]) -> None:
    """Serve the live page of a run until Ctrl-C. Port 0 takes a free one; `announce` gets the address.

    Raises:
        ConfigError: if the folder is no run, its report cannot be made, or the port cannot be had; nothing is served.
    """
    with make_server(port) as server, suppress(KeyboardInterrupt):  # a port that is taken shows at once
        server.live = LivePage(Path(folder))
        os.nice(NICENESS)
        announce(f"http://{HOST}:{server.server_port}/")
        server.serve_forever()


def make_server(port: int) -> WatchServer:
    """A server without its page: give it `live` before it serves."""
    try:
        return WatchServer((HOST, port), _Handler)
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be had ({error.strerror}): choose another with --port, or any free one with --port 0"
        ) from None


@dataclass(frozen=True)
class Page:
    """What one build came to: the page in UTF-8, and the value of its Content-Security-Policy header."""

    number: int
    html: bytes
    policy: str
    standing: str
    built_from: list[tuple[str, int, int]]


class LivePage:
    """The report of one run, as of the last look at its files. Any number of threads may look.

    Args:
        folder: the run.
        clock: seconds, for the time between builds.
        work_clock: processor seconds of the calling thread, for what a build costs.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._folder, self._clock, self._work_clock = folder, clock, work_clock
        self._building = threading.Lock()
        self._problem = ""
        self._wait_until = 0.0
        self.page = self._built(1)

    def refresh(self) -> None:
        """Build the page anew if files have changed, it is time, and no other thread is at it already."""
        if not self._building.acquire(blocking=False):
            return
        try:
            if self._clock() >= self._wait_until and _fingerprint(self._folder) != self.page.built_from:
                self.page = self._built(self.page.number + 1)
                self._problem = ""
        except (SteadyRLError, OSError) as error:  # the last page stays
            self._problem = f"The run cannot be read now: {error}"
        finally:
            self._building.release()

    def sentence(self) -> str:
        """How the run stands, for a person."""
        newest = max((stamp for _, stamp, _ in _fingerprint(self._folder)), default=None)
        ago = "" if newest is None else f" Last written {_ago(time.time() - newest / 1e9)}."
        return self._problem or self.page.standing + ago

    def _built(self, number: int) -> Page:
        start = self._work_clock()
        try:
            built_from = _fingerprint(self._folder)  # what is written meanwhile is for the next build
            now = standing(read_run(self._folder))
            with TemporaryDirectory() as place:
                report = write_report([self._folder], Path(place) / "page.html").read_text(encoding="utf-8")
        finally:
            self._wait_until = self._clock() + max(REBUILD_S, SHARE * (self._work_clock() - start))
        return Page(number, *_live(report, number), now, built_from)


def standing(run: RunData) -> str:
    """Whether the run has begun, how far it is, whether it has ended and how."""
    planned = run.config.get("trainer", {}).get("steps", "?")
    done = run.steps[-1]["step"] if run.steps else 0
    state = run.status.get("state")
    if state == "finished":
        return f"{run.name} is finished: {done} of {planned} optimizer steps."
    if state == "stopped":
        return f"{run.name} was stopped after {done} of {planned} optimizer steps; train it on with --resume."
    if state == "failed":
        reason = str(run.status.get("error", "no reason given"))[:LONGEST_REASON]
        return f"{run.name} failed after {done} of {planned} optimizer steps: {reason}."
    if not run.steps:
        return f"{run.name} has not begun: its first optimizer step is not done yet."
    return f"{run.name} is at optimizer step {done} of {planned}."


class WatchServer(ThreadingHTTPServer):
    """Answers GET requests of this machine for one page."""

    daemon_threads = True
    live: LivePage

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's would ask a name server for our own name
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that went away is no fault
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds for a client to say what it wants
    server_version, sys_version = "steadyrl", ""

    def do_GET(self) -> None:
        server = cast(WatchServer, self.server)
        live = server.live
        # a name that a stranger's page has pointed at this machine is no name of ours (DNS rebinding)
        names = {f"{name}:{server.server_port}" for name in (HOST, "localhost")}
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in names:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for this machine only\n")
        elif self.path == "/":
            live.refresh()
            page = live.page
            self._answer(HTTPStatus.OK, "text/html", page.html, page.policy)
        elif self.path == "/state":
            live.refresh()
            state = {"page": live.page.number, "sentence": live.sentence()}
            self._answer(HTTPStatus.OK, "application/json", json.dumps(state).encode("utf-8"))
        elif self.path == "/watch.js":
            self._answer(HTTPStatus.OK, "text/javascript", SCRIPT.read_bytes())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is only /\n")

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET\n")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each request."""


def _live(report: str, number: int) -> tuple[bytes, str]:
    """A report with the line that tells how the run stands and the script that renews the page; and its policy."""
    found = POLICY_TAG.search(report)
    scripts = f" {found[1]}" if found else ""
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'self'{scripts}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    head, end_tag, tail = POLICY_TAG.sub("", report, count=1).rpartition("</body>")
    assert end_tag, "a report has a body"
    return (head + STATE_LINE.format(number=number) + end_tag + tail).encode("utf-8"), policy


def _fingerprint(folder: Path) -> list[tuple[str, int, int]]:
    """Name, time of the last write in nanoseconds and size of every file that the report is made from."""
    files = [folder / name for name in (CONFIG, METRICS, EVALUATIONS, TIMELINE, STATUS)]
    files += sorted((folder / ROLLOUTS).glob("batch_*.jsonl"))
    found = []
    for file in files:
        with suppress(OSError):  # not written yet, or replaced at this moment
            stat = file.stat()
            found.append((file.name, stat.st_mtime_ns, stat.st_size))
    return found


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0, round(seconds))} s ago"
    return f"{round(seconds / 60)} min ago" if seconds < 7200 else f"{round(seconds / 3600)} h ago"
