"""Conversations that Anthropic's servers keep (`thread`): the client is told to send the whole conversation."""

from __future__ import annotations

from typing import Any

import pytest

from support.serving import Served

BODY: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
CONTINUE = {"type": "continue", "previous_message_id": "msg_1"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thread", [{"type": "create"}, CONTINUE, "x"], ids=str)
def test_threads_are_refused_with_the_code_that_clients_recover_from(
    served: Served, path: str, stream: bool, thread: object
) -> None:
    reply = served.post(path, {**BODY, "thread": thread, "stream": stream})
    assert reply.status == 400, "the server would answer the new message without the conversation before it"
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and "send the whole conversation" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_no_thread(served: Served) -> None:
    assert served.post("/v1/messages", {**BODY, "thread": None}).status == 200
    assert "details" not in served.post("/v1/messages", {**BODY, "max_tokens": -1}).json()["error"]
