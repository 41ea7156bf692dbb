"""One worker of the verifier: a process that judges one answer after another.

It is started by steadyrl.tasks.verifier as a fresh interpreter, so that neither the parent's memory nor
its main module comes along, and talks in JSON lines over its standard input and output:

    parent                               worker
                                         {"ready": true}      imports are done, the limit is set
    {"gold": .., "answer": ..}   ->                           one line or several
                                         {"begun": 1.25}      seconds of processor time used so far
                                         {"judgement": .., "detail": .., "spent": ..}

"spent" asks to be replaced: memory ran short, or so much is kept that the next answer would lack it.
The limit on memory, and the end with a parent that is killed, are Linux's.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from typing import TextIO

from steadyrl.tasks.verifier_policy import Policy

PR_SET_PDEATHSIG = 1  # of prctl
SPENT_SHARE = 0.5  # of the memory that an answer may take; a worker that keeps more is replaced
MAX_DETAIL = 300  # characters


def serve(settings: str) -> None:
    """The whole life of a worker. `settings` is a JSON object: parent, memory_bytes, policy."""
    options = json.loads(settings)
    _end_with_the_parent(options["parent"])
    requests, replies = sys.stdin.buffer, _own_output()
    from steadyrl.tasks.verifier_equality import judge  # after the output is safe: it loads sympy

    policy = Policy(**options["policy"])
    judge("1", "x", policy)  # the first answer should not pay for what is loaded late
    memory_bytes: int = options["memory_bytes"]
    start_bytes = address_space_bytes()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (start_bytes + memory_bytes, start_bytes + memory_bytes))
    _send(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        _send(replies, {"begun": time.process_time()})
        spent = False
        try:
            judgement, detail = judge(request["gold"], request["answer"], policy)
        except MemoryError:
            judgement, detail, spent = "error", "it needs more memory than memory_bytes allows", True
        except RecursionError:
            judgement, detail = "unparsable", "it is nested too deeply"
        except Exception as error:
            judgement, detail = "error", f"the comparison failed: {type(error).__name__}: {error}"[:MAX_DETAIL]
        spent = spent or address_space_bytes() - start_bytes > SPENT_SHARE * memory_bytes
        _send(replies, {"judgement": judgement, "detail": detail, "spent": spent})


def address_space_bytes() -> int:
    """What this process has mapped, the quantity that RLIMIT_AS limits; 0 where there is no /proc."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _send(replies: TextIO, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _own_output() -> TextIO:
    """The standard output for our replies alone: what a library prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _end_with_the_parent(parent: int) -> None:
    """Have the kernel kill this process with the thread that started it, also in the middle of an answer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(0)
