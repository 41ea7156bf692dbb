"""The process backend when its engine stops, dies or is not heard of: every wait ends, and nothing is left behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from steadyrl.errors import EngineError
from steadyrl.pipeline import process_backend, weights
from steadyrl.pipeline.backend import EngineSpec
from steadyrl.pipeline.group_stream import Stragglers
from steadyrl.pipeline.process_backend import ProcessBackend
from steadyrl.pipeline.weights import WeightLayout, WeightSlot
from steadyrl.types import GenerationRequest, Prompt

WEIGHTS = {"w": torch.arange(1000.0)}


def spec(timeout_s: float = 1.0, start_timeout_s: float = 120.0) -> EngineSpec:
    return EngineSpec(
        "bundled:tiny_moe", "float32", 8, False, 1, start_timeout_s, timeout_s, "keep", Stragglers(0.0, are_kept=False)
    )


def request(tokens: int = 4, prompts: int = 2, samples: int = 2) -> GenerationRequest:
    made = [Prompt(f"train/{i}", np.arange(1, tokens + 1, dtype=np.int32), "", "") for i in range(prompts)]
    return GenerationRequest(made, samples, max_response_tokens=4, temperature=1.0, seed=1)


def within(seconds: float, action: Callable[[], object]) -> BaseException | None:
    """What the action raises, or None; fails if it is not done by then."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            action()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert raised, f"still waiting after {seconds} s"
    return raised[0]


def stub_engine(monkeypatch, behaviour: Callable[[multiprocessing.connection.Connection], object]) -> ProcessBackend:
    """A backend whose engine process says that it is ready, and then does what it is told here."""

    def engine(connection, *_arguments) -> None:
        connection.send(("ready",))
        behaviour(connection)
        time.sleep(60)
        os._exit(0)

    fork = multiprocessing.get_context("fork")  # quick, and needs no importable function
    monkeypatch.setattr(process_backend.multiprocessing, "get_context", lambda _method: fork)
    monkeypatch.setattr(process_backend, "_engine_process", engine)
    return ProcessBackend(spec(), WEIGHTS)


def stop_self(_connection) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def half_a_message(connection) -> None:
    os.write(connection.fileno(), struct.pack("!i", 1_000_000) + b"x" * 1000)


def killed_while_it_sends(connection) -> None:
    connection.recv()  # with a command unread the pipe would be reset, which is another error
    half_a_message(connection)
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_nothing(backend: ProcessBackend) -> None:
    """Closes at once: the process is gone, and so are the threads and the shared memory."""
    process, names = backend._process, [slot.name for slot in backend._slots]
    assert all(Path("/dev/shm", name).exists() for name in names)
    assert within(3.0, backend.close) is None
    assert not process.is_alive()
    assert not [name for name in names if Path("/dev/shm", name).exists()]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("steadyrl-")]


def test_a_stopped_engine_and_a_large_request_end_at_the_deadline(monkeypatch):
    backend = stub_engine(monkeypatch, stop_self)
    try:
        assert within(5.0, lambda: backend.submit(request(tokens=200_000, prompts=8))) is None
        error = within(5.0, backend.collect)
        assert isinstance(error, EngineError)
        assert "gave up waiting for the engine to finish a generation" in str(error)
        leaves_nothing(backend)
    finally:
        backend._process.kill()


def test_a_stopped_engine_and_two_broadcasts_end_at_the_deadline(monkeypatch):
    backend = stub_engine(monkeypatch, stop_self)
    try:
        backend.broadcast(WEIGHTS, 3)
        backend.broadcast(WEIGHTS, 4)
        error = within(5.0, lambda: backend.broadcast(WEIGHTS, 5))
        assert isinstance(error, EngineError)
        assert "the engine to take over version 3" in str(error)
        leaves_nothing(backend)
    finally:
        backend._process.kill()


def test_half_an_answer_of_a_stopped_engine_ends_at_the_deadline(monkeypatch):
    backend = stub_engine(monkeypatch, lambda pipe: (half_a_message(pipe), stop_self(pipe)))
    try:
        backend.submit(request())
        error = within(5.0, backend.collect)
        assert isinstance(error, EngineError)
        assert "gave up waiting for the engine to finish a generation" in str(error)
        leaves_nothing(backend)
    finally:
        backend._process.kill()


def test_an_engine_killed_while_it_sends_has_died(monkeypatch):
    backend = stub_engine(monkeypatch, killed_while_it_sends)
    try:
        backend.submit(request())
        error = within(5.0, backend.collect)
        assert isinstance(error, EngineError), repr(error)
        assert "died (signal SIGKILL) while waiting for the engine to finish a generation" in str(error)
        assert "if the run folder holds a checkpoint, --resume" in str(error)
        again = within(5.0, backend.collect)
        assert isinstance(again, EngineError)
        leaves_nothing(backend)
    finally:
        backend._process.kill()


def test_the_last_words_of_an_engine_are_heard(monkeypatch):
    backend = stub_engine(monkeypatch, lambda pipe: (pipe.send(("failed", "Traceback: no luck")), os._exit(1)))
    backend.submit(request())
    error = within(5.0, backend.collect)
    assert isinstance(error, EngineError)
    assert "no luck" in str(error)
    leaves_nothing(backend)


def test_an_answer_that_cannot_be_read_names_the_cause(monkeypatch):
    backend = stub_engine(monkeypatch, lambda pipe: pipe.send_bytes(pickle.dumps(("generated",))[:-3]))
    backend.submit(request())
    error = within(5.0, backend.collect)
    assert isinstance(error, EngineError), repr(error)
    assert "could not be read" in str(error)
    leaves_nothing(backend)


def test_shared_memory_is_there_before_it_is_written():
    slot = WeightSlot(WeightLayout.of({"w": torch.zeros(1 << 20)}, torch.float32))
    try:
        assert Path("/dev/shm", slot.name).stat().st_blocks * 512 >= 4 << 20
    finally:
        slot.close()


def test_too_little_shared_memory_is_an_error_and_leaves_nothing(monkeypatch):
    reserved: list[str] = []

    def fallocate(fd: int, _offset: int, _length: int) -> None:
        reserved.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(reserved) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights.os, "posix_fallocate", fallocate, raising=False)
    with pytest.raises(EngineError, match=r"/dev/shm.* 8,000 bytes.*--shm-size"):
        ProcessBackend(spec(), WEIGHTS)
    assert len(reserved) == 2
    assert not [path for path in reserved if Path(path).exists()]


def test_signals_at_engine_start_up_do_not_end_the_engine():
    """Ctrl-C reaches the whole process group, and so an engine that has not got to ignoring it."""

    def disturb() -> None:
        known = set(multiprocessing.active_children())
        deadline = time.monotonic() + 60
        while not (new := set(multiprocessing.active_children()) - known):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for delay_s in (0.0, 0.05, 0.3, 0.6):
            time.sleep(delay_s)
            for signum in (signal.SIGINT, signal.SIGTERM):
                os.kill(new.copy().pop().pid, signum)

    thread = threading.Thread(target=disturb)
    thread.start()
    time.sleep(0.1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    from steadyrl.models.load import load_model

    model = dict(load_model("bundled:tiny_moe", torch.float32).named_parameters())
    backend = ProcessBackend(spec(timeout_s=60.0), model)
    try:
        thread.join()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
        backend.broadcast(model, 7)
        backend.submit(request())
        rollouts = backend.collect().rollouts
        assert [rollout.group for rollout in rollouts] == [0, 0, 1, 1]
        assert [loaded.version for loaded in backend.loads()] == [7]
    finally:
        leaves_nothing(backend)


TRAINER = """
import time, torch
from steadyrl.models.load import load_model
from steadyrl.pipeline.backend import EngineSpec
from steadyrl.pipeline.group_stream import Stragglers
from steadyrl.pipeline.process_backend import ProcessBackend
spec = EngineSpec(
    "bundled:tiny_moe", "float32", 8, False, 1, 120.0, 60.0, "keep", Stragglers(0.0, are_kept=False)
)
weights = dict(load_model("bundled:tiny_moe", torch.float32).named_parameters())
backend = ProcessBackend(spec, weights)
print(backend._process.pid, flush=True)
time.sleep(120)
"""


def test_a_killed_trainer_takes_a_stopped_engine_with_it():
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    engine = int(trainer.stdout.readline())
    try:
        os.kill(engine, signal.SIGSTOP)
        trainer.kill()
        trainer.wait()
        deadline = time.monotonic() + 5
        while Path(f"/proc/{engine}").exists() and ") Z " not in Path(f"/proc/{engine}/stat").read_text():
            assert time.monotonic() < deadline, "the engine outlived its trainer"
            time.sleep(0.05)
    finally:
        trainer.kill()
        if Path(f"/proc/{engine}").exists():
            os.kill(engine, signal.SIGKILL)
