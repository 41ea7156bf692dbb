"""The live page over real HTTP, of runs that never happened and grow while they are watched."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from reports.synthetic import make_batch, make_config, make_evaluation, make_report, write_run

from steadyrl.errors import ConfigError
from steadyrl.reports import watch as module
from steadyrl.reports.recorder import RunFolder, read_run
from steadyrl.reports.watch import LivePage, make_server, standing, watch


@pytest.fixture
def builds(monkeypatch):
    """Stands in for the report, which takes seconds to draw: a page with the number of steps. Counts the builds."""
    made = []

    def write_report(folders, out):
        steps = len(read_run(folders[0]).steps)
        made.append(steps)
        policy = (
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-x/+='\">"
        )
        out.write_text(f"<html><head>{policy}</head><body><main>{steps} steps</main></body></html>", encoding="utf-8")
        return out

    monkeypatch.setattr(module, "write_report", write_report)
    monkeypatch.setattr(module, "REBUILD_S", 0.0)
    monkeypatch.setattr(module, "SHARE", 0)
    return made


@contextmanager
def served(folder):
    live = LivePage(folder)
    with make_server(0) as server:
        server.live = live
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask(port, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    for name in [f"127.0.0.1:{port}"] if host is None else host:
        connection.putheader("Host", name)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return SimpleNamespace(status=answer.status, headers=answer.headers, body=body)


def state(port):
    return json.loads(ask(port, "/state").body)


def test_the_page_is_the_report_with_a_line_and_a_script_added(tmp_path, monkeypatch):
    reports, write_report = [], module.write_report

    def remember(folders, out):
        path = write_report(folders, out)
        reports.append(path.read_text(encoding="utf-8"))
        return path

    monkeypatch.setattr(module, "write_report", remember)
    write_run(tmp_path / "run", steps=6).close()
    with served(tmp_path / "run") as port:
        answer = ask(port)
    (report,) = reports
    tag = re.search(r"<meta http-equiv[^>]*>", report)[0]
    shell = module.STATE_LINE.format(number=1)
    assert answer.body.replace(shell, "") == report.replace(tag, "")
    assert answer.body.count("<svg") > 3
    for part in ('id="section-rollouts"', 'id="section-configuration"', "<main>"):  # what watch.js looks for
        assert answer.body.count(part) == 1
    assert re.search(r"script-src ([^;]*)", tag)[1].rstrip('">') in answer.headers["Content-Security-Policy"]


def test_how_a_run_stands_is_said(tmp_path, builds):
    folder = RunFolder.create(tmp_path / "run", make_config(steps=9))
    assert standing(read_run(folder.path)) == "run has not begun: its first optimizer step is not done yet."
    folder.status("running")
    with served(folder.path) as port:
        assert "has not begun" in state(port)["sentence"]
        for step in (1, 2):
            folder.step(make_report(step))
        assert state(port)["sentence"].startswith("run is at optimizer step 2 of 9. Last written")
        folder.status("stopped", step=2)
        assert "run was stopped after 2 of 9" in state(port)["sentence"]
        folder.status("failed", error="a gradient is not finite", traceback="...")
        assert "run failed after 2 of 9 optimizer steps: a gradient is not finite." in state(port)["sentence"]
        folder.status("finished")
        assert "run is finished: 2 of 9 optimizer steps." in state(port)["sentence"]


def test_it_is_built_only_when_files_changed_and_somebody_looks(tmp_path, builds):
    folder = RunFolder.create(tmp_path / "run", make_config())
    with served(folder.path) as port:
        for _ in range(3):
            assert state(port)["page"] == 1
        for step in (1, 2, 3):
            folder.step(make_report(step))
        assert builds == [0]
        assert state(port)["page"] == 2
        assert "3 steps" in ask(port).body
        folder.rollouts(make_batch(0), str)
        assert state(port)["page"] == 3
        (folder.path / "report.html").write_text("written at the end of training")
        assert state(port)["page"] == 3
    assert builds == [0, 3, 3]


def test_builds_keep_their_distance(tmp_path, builds, monkeypatch):
    monkeypatch.setattr(module, "REBUILD_S", 3.0)
    monkeypatch.setattr(module, "SHARE", 4)
    now, worked, seconds_of_a_build = [100.0], [7.0], [0.1]
    fake = module.write_report

    def slow(folders, out):
        worked[0] += seconds_of_a_build[0]
        now[0] += 2 * seconds_of_a_build[0]  # half of the time others have the processor
        return fake(folders, out)

    monkeypatch.setattr(module, "write_report", slow)
    folder = RunFolder.create(tmp_path / "run", make_config())
    live = LivePage(folder.path, clock=lambda: now[0], work_clock=lambda: worked[0])

    def number_at(time):
        now[0] = time
        folder.evaluation(make_evaluation(0, 0.5))
        live.refresh()
        return live.page.number

    assert number_at(103.1) == 1  # less than 3 s after the build that ended at 100.2
    seconds_of_a_build[0] = 2.0
    assert number_at(103.3) == 2  # ends at 107.3, and worked 2 s
    assert number_at(115.2) == 2
    assert number_at(115.4) == 3


def test_a_run_can_be_watched_while_it_is_written(tmp_path, builds):
    folder = RunFolder.create(tmp_path / "run", make_config(steps=150))
    folder.status("running")

    def train():
        for step in range(1, 151):
            folder.step(make_report(step, steps=150))
            if step % 50 == 0:  # torn rows, and files that are replaced
                with (folder.path / "evaluations.jsonl").open("a") as file:
                    file.write('{"step": 9')
                folder.rewind(make_config(steps=150), step, 0)
        folder.status("finished")

    trainer = threading.Thread(target=train)
    with served(folder.path) as port:
        trainer.start()
        seen = []
        while trainer.is_alive():
            seen.append(state(port))
        trainer.join()
        seen.append(state(port))
        assert "150 steps" in ask(port).body
    numbers = [answer["page"] for answer in seen]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 2
    assert not [answer for answer in seen if "cannot be read" in answer["sentence"]]
    assert "run is finished: 150 of 150" in seen[-1]["sentence"]
    assert builds == sorted(builds)


def test_a_run_that_cannot_be_read_keeps_its_last_page_and_recovers(tmp_path, builds):
    write_run(tmp_path / "run", steps=3).close()
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_text()
    with served(tmp_path / "run") as port:
        metrics.write_text("{]\n" + whole)
        assert "cannot be read now" in state(port)["sentence"]
        assert "line 1 is not valid JSON" in state(port)["sentence"]
        assert "3 steps" in ask(port).body
        metrics.write_text(whole + whole.splitlines(keepends=True)[-1])
        assert "cannot be read" not in state(port)["sentence"]
        assert "4 steps" in ask(port).body
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        assert "no run folder" in state(port)["sentence"]


def test_a_page_of_another_site_gets_nothing(tmp_path, builds):
    write_run(tmp_path / "run", steps=2).close()
    with served(tmp_path / "run") as port:
        for path in ("/", "/state", "/watch.js"):
            for host in (["evil.example"], [f"evil.example:{port}"], [f"127.0.0.1:{port + 1}"], [], ["127.0.0.1"]):
                answer = ask(port, path, host=host)
                assert answer.status == 403
                assert "steps" not in answer.body
            assert ask(port, path, host=[f"127.0.0.1:{port}", "evil.example"]).status == 403
        assert ask(port, host=[f"LocalHost:{port}"]).status == 200
        policy = ask(port).headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self' 'sha256-x/+=';" in policy  # the report's own script still runs
        assert "frame-ancestors 'none'" in policy
        assert "http-equiv" not in ask(port).body
        assert ask(port).headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert ask(port).headers["Access-Control-Allow-Origin"] is None


def test_only_get_and_only_the_page(tmp_path, builds):
    write_run(tmp_path / "run", steps=2).close()
    with served(tmp_path / "run") as port:
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT"):
            answer = ask(port, method=method)
            assert answer.status == 405, method
            assert answer.headers["Allow"] == "GET"
        assert ask(port, method="BREW").status == 501
        for path in ("/config.toml", "/rollouts/", "/../run/config.toml", "/%2e%2e/", "/state/", "/?x"):
            answer = ask(port, path)
            assert answer.status == 404, path
            assert "toml" not in answer.body


def test_the_server_listens_to_this_machine_alone_and_clients_may_vanish(tmp_path, builds, capfd):
    write_run(tmp_path / "run", steps=2).close()
    with make_server(0) as server:
        server.live = LivePage(tmp_path / "run")
        assert server.server_address[0] == "127.0.0.1"
    with served(tmp_path / "run") as port:
        for text in (b"", b"GET / HTT", f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()):
            client = socket.create_connection(("127.0.0.1", port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset instead of a goodbye
            client.sendall(text)
            client.close()
        assert ask(port).status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_what_cannot_be_served_is_one_sentence(tmp_path, builds, monkeypatch):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=r"no run folder at|not a run folder"):
            watch(folder, 0, pytest.fail)
    write_run(tmp_path / "run", steps=2).close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} cannot be had .*--port 0"):
            watch(tmp_path / "run", port, pytest.fail)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "steadyrl\[report\]"'):
        watch(tmp_path / "run", 0, pytest.fail)


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path):
    RunFolder.create(tmp_path / "run", make_config()).close()
    code = "from steadyrl.cli import main; main()"
    command = [sys.executable, "-c", code, "watch", str(tmp_path / "run"), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the tests may run where Ctrl-C is ignored
    ) as run:
        try:
            line = run.stdout.readline()
            port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1])
            assert ask(port).status == 200
            run.send_signal(signal.SIGINT)
            assert run.wait(timeout=60) == 0
            assert run.stdout.read() == ""
        finally:
            run.kill()
    missing = subprocess.run(
        [sys.executable, "-c", code, "watch", str(tmp_path / "none")], capture_output=True, text=True, env=environment
    )
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: there is no run folder at")
    assert missing.stderr.count("\n") == 1
