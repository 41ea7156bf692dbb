"""JSON over HTTP to one server, where everything that can go wrong is a `ServerFault`."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

from steadyrl.engines.dialect import ServerFault

SHOWN = 300  # characters of an answer that is an error


class JsonClient:
    """An `HttpClient` that keeps connections open. To be used from one event loop."""

    def __init__(self, url: str) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        # servers of one's own network: no proxy of the environment comes in between
        self._client = httpx2.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)

    async def get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
        """See `dialect.HttpClient`."""
        return await self._request("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """See `dialect.HttpClient`."""
        return await self._request("POST", path, body, timeout_s)

    async def close(self) -> None:
        await self._client.aclose()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        what = f"{method} {path.partition('?')[0]}"
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, path, json=body)
        except TimeoutError:
            raise ServerFault(f"{what}: no answer within {timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            raise ServerFault(f"{what}: {str(error) or repr(error)}") from None
        if response.status_code >= 400:
            refused = response.status_code in (400, 422)
            is_page = response.headers.get("content-type", "").startswith("text/html")
            said = "a web page, so it is no rollout server" if is_page else " ".join(response.text.split())[:SHOWN]
            raise ServerFault(f"{what}: status {response.status_code}: {said}", refused=refused)
        if not response.headers.get("content-type", "").startswith("application/json"):
            return {"text": response.text}
        try:
            answer = response.json()
        except ValueError as error:
            raise ServerFault(f"{what}: the answer is not JSON ({error})") from None
        if answer is None:
            return {}
        if not isinstance(answer, dict):
            raise ServerFault(f"{what}: the answer is a {type(answer).__name__}, not an object")
        return answer
