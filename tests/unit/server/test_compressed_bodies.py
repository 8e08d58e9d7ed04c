"""Bodies that a client or a proxy compressed are read within the limits that apply to their inflated size."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import pytest

from support.asgi import Reply
from support.serving import Served

PART_BYTES = 1 << 18  # inflated at once
BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()


def deflate_raw(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def post(served: Served, body: bytes, encoding: str, path: str = "/v1/completions") -> Reply:
    return served.post(path, body, {"content-encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("GZip", gzip.compress(BODY, mtime=0)),
        ("x-gzip", gzip.compress(BODY, mtime=0)),
        ("gzip", gzip.compress(BODY[:9], mtime=0) + gzip.compress(BODY[9:], mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", deflate_raw(BODY)),
        ("identity", BODY),
        ("Identity", BODY),
        ("", BODY),
    ],
)
def test_compressed_bodies_are_read(served: Served, encoding: str, body: bytes) -> None:
    reply = post(served, body, encoding)
    assert reply.status == 200, reply.content


def test_the_inflated_size_is_limited(serve: Callable[..., Served]) -> None:
    served = serve(options={"limit": ("body-bytes=1000000",)})
    packed = gzip.compress(b" " * 900_000 + BODY, mtime=0)
    assert post(served, packed, "gzip").status == 200
    bomb = gzip.compress(b" " * 100_000_000, mtime=0)
    assert len(bomb) < 1_000_000
    reply = post(served, bomb, "gzip")
    assert reply.status == 413
    assert "1000000 bytes" in reply.content.decode()


@pytest.mark.parametrize("num_bytes", [PART_BYTES + 1, PART_BYTES + 200])
def test_the_end_may_be_read_before_it_is_inflated(served: Served, num_bytes: int) -> None:
    """zlib has then read all of the body, and holds its last bytes."""
    assert post(served, deflate_raw(BODY.rjust(num_bytes)), "deflate").status == 200
    assert post(served, deflate_raw(BODY.ljust(num_bytes)), "deflate").status == 200


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("gzip", BODY, "not valid gzip data"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], "ends in the middle of its gzip data"),
        ("deflate", zlib.compress(BODY)[:-1], "ends in the middle of its deflate data"),
        ("deflate", zlib.compress(BODY) + b"x", "after the end of its deflate data"),
    ],
)
def test_damaged_bodies_are_named(served: Served, encoding: str, body: bytes, message: str) -> None:
    reply = post(served, body, encoding)
    assert reply.status == 400
    assert message in reply.json()["error"]["message"]  # type: ignore[index]


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip"])
def test_other_encodings_are_refused(served: Served, encoding: str) -> None:
    reply = post(served, BODY, encoding)
    assert reply.status == 415 and reply.headers["accept-encoding"] == "gzip, deflate"
    assert f"Content-Encoding {encoding} is not supported" in reply.json()["error"]["message"]  # type: ignore[index]
    error = post(served, BODY, encoding, "/v1/messages").json()["error"]
    assert error["type"] == "invalid_request_error"  # type: ignore[index]
