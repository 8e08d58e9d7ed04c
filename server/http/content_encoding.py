"""Decodes request bodies that the client compressed. A small body can inflate to gigabytes, so the parts are small and
the caller, who counts them, stops reading at its limit."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator

from starlette.requests import Request

from serve_llm.server.http.errors import InvalidRequest, UnsupportedEncoding

HEADER = "Content-Encoding"
_PART_BYTES = 1 << 18  # inflated between two turns of the event loop, which takes about 1 ms
_GZIP = 16 + zlib.MAX_WBITS
_RAW_DEFLATE = -zlib.MAX_WBITS


def read_decoded(request: Request) -> AsyncGenerator[bytes, None]:
    """Return an iterator over the body as it was before the client compressed it. Raises UnsupportedEncoding; the
    iterator raises InvalidRequest."""
    encoding = request.headers.get(HEADER, "").strip()
    match encoding.lower():
        case "" | "identity":
            return request.stream()
        case "gzip" | "x-gzip" | "deflate" as name:
            return _inflate(request, name)
        case _:
            raise UnsupportedEncoding(
                f"Content-Encoding {encoding} is not supported: send the body as it is, or as gzip or deflate", HEADER
            )


async def _inflate(request: Request, name: str) -> AsyncGenerator[bytes, None]:
    """Yield the inflated body. A gzip body may have several members. Raises InvalidRequest."""
    inflater = None
    async for chunk in request.stream():
        rest = chunk
        has_more = bool(rest)
        while has_more:
            if inflater is None:
                inflater = zlib.decompressobj(_choose_format(name, rest[0]))
            try:
                part = inflater.decompress(rest, _PART_BYTES)
            except zlib.error as error:
                raise InvalidRequest(f"the body is not valid {name} data: {error}", HEADER) from None
            if inflater.eof:
                rest = inflater.unused_data
                has_more = bool(rest)
                inflater = None
                if has_more and name == "deflate":
                    raise InvalidRequest("the body has bytes after the end of its deflate data", HEADER)
            else:
                rest = inflater.unconsumed_tail
                has_more = bool(rest) or len(part) == _PART_BYTES  # zlib may hold output of a chunk that it has read
            yield part
            await asyncio.sleep(0)
    if inflater is not None:
        raise InvalidRequest(f"the body ends in the middle of its {name} data", HEADER)


def _choose_format(name: str, first_byte: int) -> int:
    """Return zlib's `wbits` for the format. HTTP's deflate has a zlib header, which some clients omit. No compressor
    begins raw data with the first byte of such a header."""
    if name != "deflate":
        return _GZIP
    return zlib.MAX_WBITS if first_byte & 15 == zlib.DEFLATED else _RAW_DEFLATE
