"""The pool: no answer is lost, none waits for ever, none is judged by the time of another."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="needs the extra real")

from steadyrl.errors import ConfigError
from steadyrl.tasks import verifier, verifier_process
from steadyrl.tasks.verifier import Answer, Policy, Verifier
from steadyrl.tasks.verifier_process import WorkerProcess, processor_s

HUNG = r"\boxed{\binom{1000000000}{500000000}}"  # the parser works it out, for minutes
GREEDY = r"\boxed{\sum_{k=1}^{1000000} \frac{1}{k}}"
DEADLINE_S = 120.0  # of what should take seconds, on a machine that is busy with other things


@pytest.fixture(scope="module")
def pool():
    with Verifier(Policy(), workers=2) as pool:
        yield pool


def numbers(count: int, wrong: frozenset[int] = frozenset()) -> list[Answer]:
    return [Answer(gold=str(i), response=rf"So it is \boxed{{{i + (i in wrong)}}}.") for i in range(count)]


def test_a_burst_of_a_thousand_right_answers_from_a_coroutine(pool):
    verdicts = asyncio.run(pool.grade_async(numbers(1000)))
    assert [verdict.reward for verdict in verdicts] == [1.0] * 1000


def test_every_status_in_order(pool):
    asked = [
        (Answer(gold="7", response=r"\boxed{7}"), 1.0, "right"),
        (Answer(gold="7", response=r"\boxed{8}"), 0.0, "wrong"),
        (Answer(gold="7", response="I do not know."), 0.0, "unparsable"),
        (Answer(gold="7", response=r"\boxed{\foo}"), 0.0, "unparsable"),
        (Answer(gold="7", response=r"\boxed{7} and so", truncated=True), 0.0, "truncated"),
        (Answer(gold=r"\foo{7}", response=r"\boxed{7}"), 0.0, "error"),
        (Answer(gold="7", response=r"\boxed{" + "7" * 1001 + "}"), 0.0, "unparsable"),
        (Answer(gold=r"\frac{\sqrt{2}}{2}", response=r"\boxed{1/\sqrt2}"), 1.0, "right"),
        (Answer(gold="7", response="\\boxed{7\ud800}"), 0.0, "unparsable"),
    ]
    verdicts = pool.grade([answer for answer, _, _ in asked])
    assert [(verdict.reward, verdict.status) for verdict in verdicts] == [(r, s) for _, r, s in asked]
    assert [verdict.extracted for verdict in verdicts[:3]] == ["7", "8", None]
    assert all(verdict.detail for verdict in verdicts if verdict.status in ("unparsable", "error"))


def test_many_threads_at_once_get_their_own_verdicts(pool):
    wrongs = [frozenset(range(start, 60, 7)) for start in range(6)]
    results: dict[int, list[float]] = {}

    def grade(caller: int) -> None:
        results[caller] = [verdict.reward for verdict in pool.grade(numbers(60, wrongs[caller]))]

    threads = [threading.Thread(target=grade, args=(caller,)) for caller in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == {caller: [float(i not in wrongs[caller]) for i in range(60)] for caller in range(6)}


def test_an_answer_is_not_charged_for_its_time_in_the_queue():
    slow = [Answer(gold=rf"\sqrt{{{n}}}\sin x", response=rf"\boxed{{\sin x\sqrt{{{n}}}+1}}") for n in range(2, 82)]
    with Verifier(Policy(), workers=1, timeout_s=0.6) as pool:
        pid = pool.worker_pids()[0]
        before = processor_s(pid)
        verdicts = pool.grade(slow)
        assert processor_s(pid) - before > 0.6, "all of them together take longer than one may"
    assert [verdict.status for verdict in verdicts] == ["wrong"] * len(slow)


def test_hung_answers_do_not_stop_the_next_ones():
    with Verifier(Policy(), workers=2, timeout_s=0.2) as pool:
        hung = [Answer(gold="7", response=HUNG)] * 3
        verdicts = pool.grade([*hung, *numbers(100)])
    assert [verdict.status for verdict in verdicts] == ["timeout"] * 3 + ["right"] * 100


@pytest.mark.slow
def test_twenty_hung_answers_in_a_pool_of_four():
    with Verifier(Policy(), workers=4, timeout_s=0.5) as pool:
        verdicts = asyncio.run(pool.grade_async([Answer(gold="7", response=HUNG)] * 20))
        assert [verdict.status for verdict in verdicts] == ["timeout"] * 20
        assert [verdict.reward for verdict in pool.grade(numbers(100))] == [1.0] * 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}", "10^{10^{10}}", "(10^8)!", "((10^8)!)!", "10^{10^8}-10^{10^8}", r"\ln(\ln(10^{10^{10}}))",
        r"\binom{10^9}{5 \cdot 10^8}", r"\sqrt[3]{1+\sqrt[7]{10^{50000}+1}}", r"\prod_{k=1}^{10^9} \sin k",
        r"\sum_{k=1}^{10^9} \frac{1}{k^k}", r"\frac{10^{10^{10}}}{10^{10^{10}}}", r"\sin(10^{10^6})",
        "(" * 200 + "1" + ")" * 200, r"\frac{1}{" * 100 + "2" + "}" * 100,
    ],
)  # fmt: skip
def test_towers_and_their_like_get_a_status_within_the_limits(answer):
    limit = 128 << 20
    with Verifier(Policy(), workers=1, timeout_s=2.0, memory_bytes=limit) as pool:
        largest = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal largest
            ended = False
            while not ended:
                ended = done.wait(0.02)  # and once more after the end, if it came at once
                for pid in pool.worker_pids():
                    largest = max(largest, resident_bytes(pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        (verdict,) = pool.grade([Answer(gold="7", response=rf"\boxed{{{answer}}}")])
        done.set()
        watcher.join()
        assert pool.grade(numbers(3))[2].reward == 1.0
    assert verdict.reward == 0.0
    assert verdict.status in ("wrong", "unparsable", "timeout", "error")
    assert verdict.detail or verdict.status == "wrong"
    assert 0 < largest < limit + (100 << 20)


def resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def test_an_answer_that_needs_too_much_memory_is_an_error_and_costs_nobody_else_anything():
    with Verifier(Policy(), workers=1, timeout_s=60, memory_bytes=16 << 20) as pool:
        verdicts = pool.grade([*numbers(2), Answer(gold="7", response=GREEDY), *numbers(2)])
    assert [verdict.status for verdict in verdicts] == ["right", "right", "error", "right", "right"]
    assert "memory_bytes" in verdicts[2].detail


def test_killed_workers_lose_no_answer(pool):
    killed = []

    def kill() -> None:
        while len(killed) < 4 and not done.wait(0.05):
            for pid in pool.worker_pids()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    done = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    answers = [Answer(gold=rf"{n}\sqrt{{2}}", response=rf"\boxed{{\sqrt{{{2 * n * n}}}}}") for n in range(2, 82)]
    verdicts = pool.grade(answers)
    done.set()
    killer.join()
    assert killed, "the kills came too late"
    assert [(verdict.reward, verdict.detail) for verdict in verdicts] == [(1.0, "")] * len(answers)


def test_an_answer_that_always_loses_its_worker_gets_an_error(monkeypatch):
    with Verifier(Policy(), workers=1) as pool:
        reply = WorkerProcess.reply

        def die(worker: WorkerProcess, timeout_s: float):
            worker.kill()
            return reply(worker, timeout_s)

        monkeypatch.setattr(WorkerProcess, "reply", die)
        (verdict,) = pool.grade([Answer(gold="7", response=HUNG)])  # no worker answers it before it is killed
        assert (verdict.status, verdict.detail) == ("error", "its worker was killed by SIGKILL")
        monkeypatch.undo()
        assert pool.grade(numbers(2))[1].reward == 1.0


def test_a_stopped_worker_is_replaced(monkeypatch):
    monkeypatch.setattr(verifier_process, "BEGIN_TIMEOUT_S", 2.0)
    with Verifier(Policy(), workers=1) as pool:
        (pid,) = pool.worker_pids()
        os.kill(pid, signal.SIGSTOP)
        assert pool.grade(numbers(3))[2].reward == 1.0
        assert pid not in pool.worker_pids()


def test_a_worker_that_gets_no_processor_is_given_up_after_a_while(monkeypatch):
    monkeypatch.setattr(verifier_process, "processor_s", lambda pid: 0.0)
    monkeypatch.setattr(verifier_process, "WALL_FACTOR", 3)
    with Verifier(Policy(), workers=1, timeout_s=0.3) as pool:
        start = time.monotonic()
        (verdict,) = pool.grade([Answer(gold="7", response=HUNG)])
        assert verdict.status == "timeout"
        assert time.monotonic() - start >= 0.9


def test_a_cancelled_coroutine_leaves_the_pool_usable(pool):
    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.grade_async([Answer(gold="x^2", response=r"\boxed{x^2+1}")] * 400), 0.05)

    asyncio.run(impatient())
    assert [verdict.reward for verdict in pool.grade(numbers(20))] == [1.0] * 20


def test_the_event_loop_goes_on_while_answers_are_graded(pool):
    async def both() -> int:
        ticks = 0
        graded = asyncio.create_task(pool.grade_async(numbers(300)))
        while not graded.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return ticks

    assert asyncio.run(both()) > 3


def test_closing_gives_waiting_answers_an_error():
    pool = Verifier(Policy(), workers=1, timeout_s=60)
    verdicts: list[str] = []
    asking = threading.Thread(
        target=lambda: verdicts.extend(v.status for v in pool.grade([Answer(gold="7", response=HUNG)] * 3))
    )
    asking.start()
    time.sleep(0.3)
    pids = pool.worker_pids()
    pool.close()
    asking.join(DEADLINE_S)
    assert verdicts == ["error"] * 3
    assert pids
    assert not any(is_running(pid) for pid in pids)


PARENT = """
import sys, threading, time
from steadyrl.tasks.verifier import Answer, Policy, Verifier
pool = Verifier(Policy(), workers=2, timeout_s=600)
threading.Thread(target=pool.grade, args=([Answer(gold="7", response=sys.argv[1])] * 2,), daemon=True).start()
while len(pool.worker_pids()) < 2:
    time.sleep(0.05)
time.sleep(0.5)
print(*pool.worker_pids(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux")
def test_no_worker_outlives_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, HUNG], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait(DEADLINE_S)
    parent.stdout.close()
    deadline = time.monotonic() + 10.0
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(pids) == 2
    assert not left


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_stays_light():
    heavy = ["torch", "transformers", "numpy", "pydantic"]
    code = (
        "import sys, steadyrl.tasks.verifier_worker, steadyrl.tasks.verifier_equality; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_library_prints_does_not_disturb_the_replies():
    code = (
        "import os, sys; from steadyrl.tasks import verifier_equality, verifier_worker; "
        "judge = verifier_equality.judge; "
        "verifier_equality.judge = lambda *a: (print('noise'), os.write(1, b'noise\\n'), judge(*a))[2]; "
        "verifier_worker.serve(sys.argv[1])"
    )
    settings = {"parent": os.getpid(), "memory_bytes": 64 << 20, "policy": {}}
    worker = WorkerProcess([sys.executable, "-c", code, json.dumps(settings)])
    try:
        worker.wait_ready(DEADLINE_S)
        worker.send(b'{"gold": "7", "answer": "7"}\n')
        assert worker.reply(DEADLINE_S)["judgement"] == "right"
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"workers": 0}, "at least 1"),
        ({"timeout_s": 0.0}, "above 0"),
        ({"memory_bytes": 1024}, "at least"),
    ],
)
def test_an_argument_out_of_its_range_is_refused_with_the_remedy(arguments, remedy):
    with pytest.raises(ConfigError, match=remedy):
        Verifier(Policy(), **arguments)


def test_a_missing_package_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(verifier.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        Verifier(Policy())


def test_workers_that_cannot_start_are_refused(monkeypatch):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(verifier, "_command", lambda policy, memory_bytes: command)
    with pytest.raises(ConfigError, match="exit code 3"):
        Verifier(Policy(), workers=1)


def test_the_example_of_the_documents_prints_what_they_say():
    page = (Path(__file__).parents[2] / "docs" / "verifier.md").read_text(encoding="utf-8")
    code, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert done.stdout == output
