"""What the server says about bodies whose text is no JSON."""

from __future__ import annotations

import pytest

from support.serving import Served


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "a\\\\ud800\\ud83d\\ude00 \\uD83D"}', "lone surrogate, \\uD83D at offset 33"),
        (b'{"prompt": "a\\ud83d\\ud83d\\ude00"}', "lone surrogate, \\ud83d at offset 13"),
        (b'{"prompt": "\\udc00\\ud83d"}', "lone surrogate, \\udc00 at offset 12"),
        (b'{"prompt": "caf\xe9"}', "must be in UTF-8: the byte 0xe9 at offset 15"),
        ('{"prompt": "x"}'.encode("utf-16"), "UTF-16"),
        ('{"prompt": "x"}'.encode("utf-16-be"), "UTF-16"),
        (b'{"prompt": "\\u12"}', "malformed JSON"),
    ],
)
def test_what_is_wrong_with_the_text_of_a_body_is_explained(served: Served, body: bytes, reason: str) -> None:
    reply = served.post("/v1/completions", body)
    assert reply.status == 400 and reason in reply.json()["error"]["message"]


def test_a_byte_order_mark_is_ignored(served: Served) -> None:
    assert served.post("/v1/completions", b'\xef\xbb\xbf{"prompt": "x"}').status == 200


def test_a_body_that_will_be_too_long_is_refused_before_it_is_read(served: Served) -> None:
    reply = served.post("/v1/completions", {"prompt": "x"}, {"content-length": str(2**40)})
    assert reply.status == 413 and "longer than" in reply.json()["error"]["message"]  # type: ignore[index]
