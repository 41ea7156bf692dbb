"""What vLLM and SGLang answer alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steadyrl.engines.dialect import HttpClient, VersionSpan


async def tokenize(client: HttpClient, text: str, *, timeout_s: float) -> list[int] | None:
    """See `dialect.Dialect.tokenize`."""
    answer = await client.post("/tokenize", {"prompt": text, "add_special_tokens": False}, timeout_s=timeout_s)
    tokens = answer.get("tokens")
    return tokens if isinstance(tokens, list) else None


async def counter(client: HttpClient, name: str, *, timeout_s: float) -> float | None:
    """Sum of a Prometheus counter over its labels; None where the server has none of this name."""
    text = (await client.get("/metrics", timeout_s=timeout_s)).get("text", "")
    counts = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]
    return sum(counts) if counts else None


def version_spans(spans: Sequence[dict[str, Any]] | None) -> list[VersionSpan]:
    return [VersionSpan(str(span["version"]), int(span["start"]), int(span["end"])) for span in spans or []]
