"""Hostile requests to /v1/files and /v1/batches."""

from __future__ import annotations

import json
from collections.abc import Iterator

from support.hostile import COMPLETIONS, MANY, Case


def batch_cases() -> Iterator[Case]:
    """Yield uploads that are not forms, and missing files and batches."""
    form = (("Content-Type", "multipart/form-data; boundary=cut"),)
    part = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n'
    purpose = b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    bodies = [
        b"",
        b"--cut",
        b"--cut--\r\n",
        b"{}",
        b"\x00" * 1000,
        part,
        part + b"--cut--\r\n",
        purpose + b"--cut--\r\n",
    ]
    bodies += [part * 2 + purpose + b"--cut--\r\n", purpose * 50 + b"--cut--\r\n", purpose + part[:60]]
    bodies += [purpose.replace(b"batch", b"b" * 200_000) + part + b"--cut--\r\n", b"--cut\r\n" + b"A: b\r\n" * 100_000]
    bodies += [
        part.replace(b'"file"', b'"' + b"f" * 100_000 + b'"') + b"--cut--\r\n",
        purpose.replace(b"\r\n\r\n", b""),
    ]
    for number, body in enumerate(bodies):
        yield Case(f"upload {number}", "/v1/files", body, headers=form)
    for kind in ("", "text/plain", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 1000):
        yield Case(f"upload as {kind[:30]!r}", "/v1/files", purpose + part, headers=(("Content-Type", kind),))
    for name in ("file-x", "%00", "%2e%2e%2fbatches.db", "..%2f..", "x" * 5000, "'%20OR%201=1--"):
        for method, path in (
            ("GET", f"/v1/files/{name}"),
            ("GET", f"/v1/files/{name}/content"),
            ("DELETE", f"/v1/files/{name}"),
            ("GET", f"/v1/batches/{name}"),
            ("POST", f"/v1/batches/{name}/cancel"),
        ):
            yield Case(f"{method} {path[:40]}", path, b"", method)
    good = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    for name in good:
        for value in (None, 5, {}, [], "", "x" * MANY, "\x00", "../x"):
            yield Case(f"batch {name}={str(value)[:9]!r}", "/v1/batches", json.dumps(good | {name: value}).encode())
    for body in (b"", b"[]", b"{", b'{"metadata": ' + b"[" * 1000, b" " * 10**6):
        yield Case(f"batch {body[:9]!r}", "/v1/batches", body)
    for query in ("limit=0", "limit=x", "after=file-x", "order=x", "limit=99999999999"):
        yield Case(f"files {query}", f"/v1/files?{query}", b"", "GET")
