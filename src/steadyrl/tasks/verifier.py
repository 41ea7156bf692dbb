"""Grading of mathematical answers in a pool of worker processes.

    grade, grade_async      find each answer in its response, queue it  (the caller's thread)
    queue                   answers of all callers, oldest first
    keeper threads          one for each worker: take an answer, give it to the worker, wait for the verdict
    worker processes        judge one answer at a time; see verifier_worker.py

An answer's time starts when its worker says that it has begun. At the deadline the worker is killed and
the answer gets "timeout"; the keeper starts another worker. A worker that dies without a reply gives
its answer back, which is then judged by another one. The workers are killed with the thread that keeps
them, so none outlives the process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict

from steadyrl.errors import ConfigError
from steadyrl.tasks.verifier_job import MAX_LINE_BYTES, Answer, Job, Verdict
from steadyrl.tasks.verifier_policy import Policy
from steadyrl.tasks.verifier_process import MAX_BYTES, WorkerDied, WorkerProcess, WorkerTimeout

MAX_CHUNK = 16  # answers handed to a worker at once
MAX_ATTEMPTS = 3  # workers that an answer may lose
MIN_MEMORY_BYTES = 16 << 20
START_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 5.0


class Verifier:
    """A pool that grades answers for any number of threads and coroutines at once. A context manager.

    Args:
        policy: what counts as right where tastes differ.
        workers: processes; each holds about 80 MB.
        timeout_s: seconds that one answer may take in its worker, without the time in the queue.
        memory_bytes: what one answer may allocate on top of what the worker holds.

    Raises:
        ConfigError: math-verify is not installed, an argument is out of its range, or no worker starts.
    """

    def __init__(self, policy: Policy, workers: int = 2, timeout_s: float = 5.0, memory_bytes: int = 512 << 20) -> None:
        _check(workers, timeout_s, memory_bytes)
        self._policy = policy
        self._timeout_s = timeout_s
        self._command = _command(policy, memory_bytes)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._running: dict[int, WorkerProcess] = {}  # by keeper
        self._keepers = [
            threading.Thread(target=self._keep, args=(number,), name=f"steadyrl-verifier-{number}", daemon=True)
            for number in range(workers)
        ]
        for keeper in self._keepers:
            keeper.start()
        trial = self.grade([Answer(gold="1", response=r"\boxed{1}")])[0]
        if trial.status != "right":
            self.close()
            raise ConfigError(f"the verifier does not work here, mend what it says: {trial.detail or trial.status}")

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, answers: Sequence[Answer]) -> list[Verdict]:
        """The verdicts in the order of the answers. Blocks; call it from any thread."""
        futures = self._submit(answers)
        return [future.result(self._patience_s(len(futures))) for future in futures]

    async def grade_async(self, answers: Sequence[Answer]) -> list[Verdict]:
        """The same for coroutines: the event loop goes on meanwhile."""
        futures = self._submit(answers)
        graded = asyncio.gather(*map(asyncio.wrap_future, futures))
        return list(await asyncio.wait_for(graded, self._patience_s(len(futures))))

    def close(self) -> None:
        """End the workers; answers that wait get the status "error"."""
        with self._lock:
            self._closed = True
            running = list(self._running.values())
        for _ in self._keepers:
            self._jobs.put(None)
        for worker in running:
            worker.kill()
        for keeper in self._keepers:
            keeper.join(CLOSE_TIMEOUT_S)
        while (job := self._next_left_over()) is not None:
            job.give_up()

    def worker_pids(self) -> list[int]:
        """The processes that run at the moment."""
        with self._lock:
            return [worker.pid for worker in self._running.values()]

    def _submit(self, answers: Sequence[Answer]) -> list[Future[Verdict]]:
        assert not self._closed, "the verifier was closed"
        jobs = [Job(answer, self._policy) for answer in answers]
        for job in jobs:
            if not job.verdict.done():
                self._enqueue(job)
        return [job.verdict for job in jobs]

    def _patience_s(self, count: int) -> float:
        """How long the last of these answers can take, with every worker hung at every answer before it."""
        rounds = (self._jobs.qsize() + count) // len(self._keepers) + 2
        return rounds * MAX_ATTEMPTS * (self._timeout_s + START_TIMEOUT_S)

    def _enqueue(self, job: Job) -> None:
        with self._lock:  # after the lock, an answer is in the queue that `close` empties, or knows that it is closed
            closed = self._closed
            if not closed:
                self._jobs.put(job)
        if closed:
            job.give_up()

    def _next_left_over(self) -> Job | None:
        """An answer still in the queue, past the keepers' signs to stop."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return None
            if job is not None:
                return job

    def _keep(self, number: int) -> None:
        """The life of a keeper thread: keep one worker running, and hand it answers."""
        while not self._closed:
            trouble = self._ensure_worker(number)
            jobs = self._take()
            if jobs is None:
                break
            if trouble:
                self._give_back(jobs, trouble)
            elif not self._work_through(self._running[number], jobs):
                self._discard(number)
        self._discard(number)

    def _take(self) -> deque[Job] | None:
        """The next answers for one worker: several while many wait, since each exchange costs two switches."""
        jobs: deque[Job] = deque()
        size = 0
        share = min(MAX_CHUNK, 1 + self._jobs.qsize() // (2 * len(self._keepers)))
        while len(jobs) < share:
            try:
                job = self._jobs.get() if not jobs else self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                if not jobs:
                    return None
                self._jobs.put(None)
                break
            if job.start():
                jobs.append(job)
                size += len(job.line)
            if size > MAX_BYTES - MAX_LINE_BYTES:
                break
        return jobs

    def _work_through(self, worker: WorkerProcess, jobs: deque[Job]) -> bool:
        """Settle the answers in turn; false when the worker has to be replaced. Nothing is lost on the way."""
        try:
            worker.send(b"".join(job.line for job in jobs))
            while jobs:
                reply = worker.reply(self._timeout_s)
                status = reply["judgement"]
                jobs.popleft().settle(status, reply["detail"])
                if reply["spent"]:
                    self._give_back(jobs)
                    return False
            return True
        except WorkerTimeout as error:
            jobs.popleft().settle("timeout", str(error))
            self._give_back(jobs)
        except WorkerDied as error:
            self._give_back([jobs.popleft()], str(error))
            self._give_back(jobs)
        except Exception as error:  # a fault of ours: no answer may be left without a verdict
            while jobs:
                jobs.popleft().settle("error", f"the verifier failed: {type(error).__name__}: {error}")
        return False

    def _give_back(self, jobs: Iterable[Job], trouble: str = "") -> None:
        """Queue answers again; one that has lost MAX_ATTEMPTS workers gets an error."""
        for job in jobs:
            job.attempts += bool(trouble)
            if job.attempts == MAX_ATTEMPTS:
                job.settle("error", trouble)
            else:
                self._enqueue(job)

    def _ensure_worker(self, number: int) -> str:
        """Start a worker where there is none; what went wrong, or nothing."""
        if number in self._running:
            return ""
        try:
            worker = WorkerProcess(self._command)
        except OSError as error:
            return f"a worker could not be started: {error}"
        with self._lock:
            self._running[number] = worker
            if self._closed:
                worker.kill()
        try:
            worker.wait_ready(START_TIMEOUT_S)
        except WorkerDied as error:
            self._discard(number)
            return str(error)
        return ""

    def _discard(self, number: int) -> None:
        with self._lock:
            worker = self._running.pop(number, None)
        if worker is not None:
            worker.close()


def _command(policy: Policy, memory_bytes: int) -> list[str]:
    settings = {"parent": os.getpid(), "memory_bytes": memory_bytes, "policy": asdict(policy)}
    code = (
        "import json, sys; settings, path = sys.argv[1:]; sys.path[:] = json.loads(path); "
        "from steadyrl.tasks.verifier_worker import serve; serve(settings)"
    )
    return [sys.executable, "-c", code, json.dumps(settings), json.dumps(sys.path)]


def _check(workers: int, timeout_s: float, memory_bytes: int) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError('grading of mathematics needs a package: pip install "steadyrl[real]"')
    if workers < 1:
        raise ConfigError(f"a verifier with {workers} workers grades nothing: give it at least 1")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s = {timeout_s} of the verifier: write a time above 0")
    if memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigError(f"memory_bytes = {memory_bytes} of the verifier: write at least {MIN_MEMORY_BYTES}")
