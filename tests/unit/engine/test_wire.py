"""The messages between server and engine: every one comes back as it was, and no bytes do worse than be refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.engine import wire
from serve_llm.engine.options import Options
from serve_llm.engine.types import FinishReason, ModelFacts, Output, Request, Sampling, Stats, TokenLogprobs

LOGPROBS = TokenLogprobs(-0.5, 1, [1, 2], [-0.5, -1.5])
REQUEST = Request(id=1, prompt_ids=[1, 2, 3], sampling=Sampling(max_tokens=5, seed=2**64 - 1, logit_bias={3: 1.0}))
FACTS = ModelFacts(
    architecture="X",
    max_model_len=1,
    vocab_size=2,
    block_size=16,
    num_kv_blocks=3,
    kv_cache_tokens=48,
    max_num_seqs=4,
    dtype="float32",
    device="cpu",
)
TO_ENGINE = [
    wire.Start(Options.from_kwargs("demo", max_queue="3,4", limit=["n=2"]), "/model"),
    wire.Submit([REQUEST]),
    wire.Abort([1, 2]),
    wire.Shutdown(),
]
FROM_ENGINE = [
    wire.Ready(FACTS),
    wire.Failed("ModelError", "no"),
    wire.Step([Output(1, [5], FinishReason.STOP, 5, 3, 0.1, [LOGPROBS], [LOGPROBS])], Stats(num_running=1)),
]
DIRECTIONS = [(wire.decode_to_engine, TO_ENGINE), (wire.decode_from_engine, FROM_ENGINE)]


@pytest.mark.parametrize(("decode", "messages"), DIRECTIONS)
def test_messages_come_back_as_they_were(decode, messages) -> None:
    for message in messages:
        assert decode(wire.encode(message)) == message


@given(st.data())
def test_broken_bytes_are_refused_and_nothing_else(data) -> None:
    decode, messages = data.draw(st.sampled_from(DIRECTIONS))
    content = bytearray(wire.encode(data.draw(st.sampled_from(messages))))
    for _ in range(data.draw(st.integers(0, 8))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from("setcutgrow")):
            case "s" | "e" | "t":
                content[place] = data.draw(st.integers(0, 255))
            case "c" | "u":
                del content[place:]
            case _:
                content[place:place] = data.draw(st.binary(max_size=9))
        if not content:
            break
    _refused_or_a_message(decode, bytes(content), messages)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(content: bytes) -> None:
    for decode, messages in DIRECTIONS:
        _refused_or_a_message(decode, content, messages)


@pytest.mark.parametrize(
    "content", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000, b"\x81\xa1a" * 9999]
)
def test_lengths_that_lie_and_depth_cost_nothing(content: bytes) -> None:
    for decode, messages in DIRECTIONS:
        _refused_or_a_message(decode, content, messages)


def _refused_or_a_message(decode, content: bytes, messages) -> None:
    try:
        found = decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    assert type(found) in {type(message) for message in messages}
