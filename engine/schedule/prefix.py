"""Names for prefixes: a chained hash per full block, so that equal keys mean equal tokens from the very start.

The chain starts from the salt (`cache_salt`), so that requests of different tenants never share blocks, and from
whether the rope is turned, which makes other keys of the same tokens. SHA-256, because a client who could make two
prefixes collide could read another's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root(salt: str, is_turned: bool = False) -> bytes:
    """The hash before the first block."""
    return sha256((b"turned" if is_turned else b"serve-llm") + salt.encode("utf-8", "surrogatepass")).digest()


def extend(parent: bytes, ids: Sequence[int]) -> bytes:
    """The hash after one more full block of token ids."""
    return sha256(parent + array("q", ids).tobytes()).digest()
