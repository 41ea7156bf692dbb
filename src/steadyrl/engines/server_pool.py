"""Several servers behind one engine: who gets a request, who is trusted with one, and what becomes of the rest.

A server is `ready` while it holds the present weights, verified, and does what it is asked. One that fails a request,
does not answer for its health, or stops to generate is `out`, and everything that it was working on is asked elsewhere.
A server that is out is looked after until it is well: its weights are loaded again unless they are the present ones,
verified in any case, and then it is ready again. While one loads weights it is `loading` and gets no request.

All of this runs in one event loop; nothing here is called from another thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from steadyrl.engines.dialect import Completion, Dialect, Pause, ServerFault, ServerInfo
from steadyrl.engines.http_client import JsonClient
from steadyrl.engines.server import Job, Patience, Server, Weights
from steadyrl.errors import EngineError

logger = logging.getLogger(__name__)
T = TypeVar("T")


Check = Callable[[Job, Server, list[Completion]], None]  # raises ServerFault
Verify = Callable[[Server, Weights], Awaitable[None]]  # that a server holds these weights; raises ServerFault
Examine = Callable[[Server, ServerInfo], None]  # what a server says about itself; raises ServerFault


class ServerPool:
    """See the module.

    Args:
        urls: of the servers.
        dialect: that all of them speak.
        patience: for all waits.
        pause: what becomes of running responses while weights are loaded.
        most_responses: a server works on at a time; more wait here.
        routed_experts: ask for them.
        examine, verify, check: whether a server is the right one, holds the right weights, gave a right answer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        dialect: Dialect,
        patience: Patience,
        *,
        pause: Pause,
        most_responses: int,
        routed_experts: bool,
        examine: Examine,
        verify: Verify,
        check: Check,
    ) -> None:
        self.servers = [Server(url, JsonClient(url)) for url in urls]
        self.weights: Weights | None = None  # that requests are answered with
        self.retries = 0  # requests that were asked for again
        self.outages = 0  # times that a server that was ready, or took over weights, was out
        self._dialect = dialect
        self._patience = patience
        self._pause: Pause = pause
        self._most_responses = most_responses
        self._routed_experts = routed_experts
        self._examine, self._verify, self._check = examine, verify, check
        self._changed = asyncio.Condition()
        self._used_s = time.monotonic()  # until when a server was not out
        self._is_broadcasting = False
        self._keepers: list[asyncio.Task[None]] = []

    # ---- the servers' life ----

    async def connect(self) -> None:
        """Wait until every server answers, and look after them from now on.

        Raises:
            EngineError: one does not, or is not what it should be.
        """
        deadline = time.monotonic() + self._patience.start_s
        for server in self.servers:
            while True:
                try:
                    info = await self._dialect.info(server.client)
                    break
                except ServerFault as fault:
                    if time.monotonic() >= deadline:
                        raise EngineError(
                            f"the rollout server {server.url} did not answer within {self._patience.start_s:.0f} s "
                            f"({fault}): start it (steadyrl rollout-server prints the command), or correct engine.urls"
                        ) from None
                    await asyncio.sleep(self._patience.poll_s)
            server.software = info.software
            try:
                self._examine(server, info)
            except ServerFault as fault:
                raise EngineError(f"the rollout server {server.url} cannot be used: {fault}") from None
        self._keepers = [asyncio.create_task(self._keep(server)) for server in self.servers]

    async def close(self) -> None:
        for task in [*self._keepers, *(task for server in self.servers for task in server.work)]:
            task.cancel()
        for server in self.servers:
            await server.client.close()

    def describe(self) -> str:
        return "; ".join(
            f"{server.url} {'is ready' if server.state == 'ready' else f'is {server.state}: {server.why}'}"
            for server in self.servers
        )

    async def _keep(self, server: Server) -> None:
        """Look after one server for as long as the pool exists."""
        strikes, tokens, moved_s = 0, None, time.monotonic()
        while True:
            await asyncio.sleep(self._patience.poll_s)
            if server.state == "out":
                await self._mend(server)
                strikes, moved_s = 0, time.monotonic()
                continue
            try:
                now = await self._dialect.progress(server.client, timeout_s=self._patience.health_s)
            except ServerFault as fault:
                strikes += 1
                if strikes >= self._patience.strikes:
                    await self._take_out(server, str(fault), drop=True)
                continue
            strikes = 0
            if now is None or now != tokens or not server.responses or server.state == "loading":
                tokens, moved_s = now, time.monotonic()
            elif time.monotonic() - moved_s >= self._patience.stall_s:
                stall = f"it has requests and gave no token for {self._patience.stall_s:.0f} s"
                await self._take_out(server, stall, drop=True)

    async def _mend(self, server: Server) -> None:
        """Try to make a server that is out ready again."""
        async with server.weights_lock:
            weights = self.weights
            if weights is None or self._is_broadcasting:
                return
            try:
                await self._dialect.progress(server.client, timeout_s=self._patience.health_s)
                info = await self._dialect.info(server.client)
                self._examine(server, info)
                if info.weight_version == weights.tag:
                    await self._dialect.resume(server.client)
                    await self._prove(server, weights)
                else:  # it may be another process
                    server.holds = None
                    await self._load(server, weights)
            except ServerFault as fault:
                await self._take_out(server, str(fault), drop=True)
                return
            if weights is self.weights:
                await self._take_in(server, weights)
                logger.warning("the rollout server %s is ready again", server.url)

    async def _take_in(self, server: Server, weights: Weights) -> None:
        server.state, server.why, server.holds = "ready", "", weights
        await self._tell()

    async def _take_out(self, server: Server, why: str, *, drop: bool) -> None:
        """Trust a server no longer; with `drop`, neither with what it is working on."""
        if server.state == "loading" and not drop:
            return  # its weights are being seen to
        if server.state == "ready":
            logger.warning("the rollout server %s is out: %s", server.url, why)
        if server.state != "out":
            self._used_s = time.monotonic()
            self.outages += 1
        server.state, server.why = "out", why
        if drop:
            for task in server.work:
                task.cancel()
        await self._tell()

    def _check_hope(self) -> None:
        """Raises EngineError where no server has been ready for too long."""
        all_out = all(server.state == "out" for server in self.servers)
        if all_out and time.monotonic() - self._used_s > self._patience.recovery_s:
            raise EngineError(f"no rollout server was ready for {self._patience.recovery_s:.0f} s: {self.describe()}")

    # ---- weights ----

    async def broadcast(self, weights: Weights) -> None:
        """Bring weights into the servers; those that cannot take them are out.

        Raises:
            EngineError: no server could, or there is none; the present weights stay the present ones.
        """
        if self.weights is not None:
            while not any(server.state == "ready" for server in self.servers):
                self._check_hope()
                await asyncio.sleep(self._patience.poll_s)
        targets = [server for server in self.servers if server.state == "ready" or self.weights is None]
        self._is_broadcasting = True
        try:
            faults = await asyncio.gather(*(self._broadcast_to(server, weights) for server in targets))
            arrived = [server for server, fault in zip(targets, faults, strict=True) if fault is None]
            if not arrived:
                why = "; ".join(f"{server.url}: {fault}" for server, fault in zip(targets, faults, strict=True))
                raise EngineError(f"no rollout server took over the weights {weights.tag}: {why}")
            self.weights = weights
            for server in arrived:
                await self._take_in(server, weights)
        finally:
            self._is_broadcasting = False

    async def _broadcast_to(self, server: Server, weights: Weights) -> str | None:
        """Why the weights did not arrive; None if they did. Tried twice."""
        async with server.weights_lock:
            why = ""
            for _ in range(2):
                server.state, server.why = "loading", f"it takes over the weights {weights.tag}"
                try:
                    await self._on(server, self._load(server, weights))
                    return None
                except ServerFault as fault:
                    why = str(fault)
                    # what it samples meanwhile may come from half of the weights, under the name of all of them
                    await self._take_out(server, why, drop=True)
                    logger.warning("the rollout server %s did not take over %s: %s", server.url, weights.tag, why)
            return why

    async def _load(self, server: Server, weights: Weights) -> None:
        timeout_s = self._patience.weights_s
        await self._dialect.pause(server.client, self._pause, timeout_s=timeout_s)
        try:
            await self._dialect.load(server.client, weights.folder, weights.tag, timeout_s=timeout_s)
        except ServerFault:
            with suppress(ServerFault):
                await self._dialect.resume(server.client)
            raise
        await self._dialect.resume(server.client)
        await self._prove(server, weights)

    async def _prove(self, server: Server, weights: Weights) -> None:
        await self._verify(server, weights)
        server.verified.add(weights.tag)

    # ---- requests ----

    async def generate(self, job: Job) -> list[Completion]:
        """The responses to one prompt; none if it was canceled and the server does not say what there is of it.

        Raises:
            ServerFault: no attempt gave an answer that can be used; the last reason.
            EngineError: there is no server left to ask.
        """
        size = job.request.samples_per_prompt
        tried: list[Server] = []
        while (server := await self._place(job, tried)) is not None:
            try:
                return await self._ask(server, job)
            except ServerFault as fault:
                if job.is_canceled:
                    return []
                if fault.refused:
                    raise ServerFault(f"{server.url} refuses the request: {fault}") from None
                tried.append(server)
                await self._take_out(server, str(fault), drop=False)
                if len(tried) == self._patience.attempts:
                    raise ServerFault(f"{len(tried)} attempts failed, the last at {server.url}: {fault}") from None
                self.retries += 1
            finally:
                job.server, job.task = None, None
                server.responses -= size
                await self._tell()
        return []

    async def _place(self, job: Job, tried: Sequence[Server]) -> Server | None:
        """Wait for a place at the ready server that has least to do, one that was not tried if there is one."""
        size = job.request.samples_per_prompt
        while not job.is_canceled:
            ready = [server for server in self.servers if server.state == "ready" and server.holds is self.weights]
            free = [s for s in ready if s.responses == 0 or s.responses + size <= self._most_responses]
            if free := [server for server in free if server not in tried] or free:
                server = min(free, key=lambda server: server.responses)
                server.responses += size
                job.server = server
                job.started_s = job.started_s or time.monotonic()
                return server
            self._check_hope()
            async with self._changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._patience.poll_s)
        return None

    async def _ask(self, server: Server, job: Job) -> list[Completion]:
        answer = self._dialect.generate(
            server.client,
            job.request_id,
            job.prompt,
            job.request,
            weights=server.holds.tag if server.holds else "",
            routed_experts=self._routed_experts,
            timeout_s=self._patience.request_s,
        )
        completions = await self._on(server, answer, job)
        async with server.weights_lock:  # tokens may come from weights that are being verified
            self._check(job, server, completions)
        return completions

    async def _on(self, server: Server, work: Coroutine[Any, Any, T], job: Job | None = None) -> T:
        """Do something that ends, with the reason, when the server is given up."""
        task = asyncio.create_task(work)
        server.work.add(task)
        if job is not None:
            job.task = task
        try:
            await asyncio.wait({task})
        finally:
            server.work.discard(task)
            task.cancel()  # where the wait itself was canceled
        if task.cancelled():
            raise ServerFault(server.why)
        return task.result()

    async def cancel(self, job: Job, within_s: float) -> None:
        """Have `generate` return what there is of a job, or nothing if the server does not say in time."""
        job.is_canceled = True
        await self._tell()
        server, task = job.server, job.task
        if server is None or task is None:
            return
        try:
            await self._dialect.abort(server.client, job.request_id)
            await asyncio.wait({task}, timeout=within_s)
        except ServerFault as fault:
            logger.warning("the rollout server %s did not end a response: %s", server.url, fault)
        task.cancel()

    async def _tell(self) -> None:
        """Have all that wait for a place look again."""
        async with self._changed:
            self._changed.notify_all()
