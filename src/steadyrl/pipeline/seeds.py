"""Independent seeds for the named streams of random numbers of a run."""

from __future__ import annotations

import hashlib


def stream_seed(seed: int, stream: str) -> int:
    """A seed for one stream, such as "rollouts", that no other stream or run seed gives."""
    return int.from_bytes(hashlib.blake2s(f"{seed}/{stream}".encode(), digest_size=7).digest(), "big")
