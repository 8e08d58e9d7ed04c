"""Hashes of prefixes: one chained hash per full block, so that equal hashes mean equal tokens from the beginning.

The chain starts from the salt (`cache_salt`), so that requests with different salts never share blocks, and from
everything else that changes the keys of the same tokens: whether the long RoPE factors apply, and the contents of a
LoRA adapter. Uses SHA-256, because a client that could make two prefixes collide could read another client's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root(salt: str, uses_long_rope: bool = False, adapter: str = "") -> bytes:
    """Return the hash that the chain starts from. adapter: the digest of the request's adapter; "" without one."""
    base = sha256((b"long-rope" if uses_long_rope else b"serve-llm") + salt.encode("utf-8", "surrogatepass")).digest()
    return sha256(base + adapter.encode()).digest() if adapter else base


def extend(parent: bytes, ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hash after each further full block. An incomplete block at the end of `ids` is ignored."""
    hashes = []
    data = array("q", ids).tobytes()
    num_bytes = 8 * block_size
    for start in range(0, len(ids) // block_size * num_bytes, num_bytes):
        parent = sha256(parent + data[start : start + num_bytes]).digest()
        hashes.append(parent)
    return hashes
