"""The messages between server and engine: each one survives encoding, and malformed bytes are only ever refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.common import messages
from serve_llm.common.errors import CapacityError, EngineError, RankFailed
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelInfo,
    Sampling,
    SchedulerStats,
    TokenLogprobs,
)

LOGPROBS = TokenLogprobs(-0.5, 1, [1, 2], [-0.5, -1.5])
REQUEST = EngineCoreRequest(
    id=1, prompt_ids=[1, 2, 3], sampling=Sampling(max_tokens=5, seed=2**64 - 1, logit_bias={3: 1.0})
)
MODEL_INFO = ModelInfo(
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
    messages.Start(make_options("demo", tensor_parallel_split="3,1", kv_cache_memory="1GiB").for_engine(), "/model"),
    messages.Submit([REQUEST]),
    messages.Abort([1, 2]),
    messages.Shutdown(),
]
FROM_ENGINE = [
    messages.EngineReady(MODEL_INFO),
    messages.Failed("ModelError", "no"),
    messages.EngineCoreOutputs(
        [EngineCoreOutput(1, [5], FinishReason.STOP, 5, 3, 0.1, [LOGPROBS], [LOGPROBS])], SchedulerStats(num_running=1)
    ),
]
DIRECTIONS = [(messages.decode_to_engine, TO_ENGINE), (messages.decode_from_engine, FROM_ENGINE)]


@pytest.mark.parametrize(("decode", "kinds"), DIRECTIONS)
def test_messages_come_back_as_they_were(decode, kinds) -> None:
    for message in kinds:
        assert decode(messages.encode(message)) == message


def test_a_failure_becomes_the_exception_that_it_was() -> None:
    class TooSmall(CapacityError):
        pass

    again = messages.Failed.from_exception(TooSmall("needs 2 GPUs")).to_exception(prefix="node 1: ")
    assert type(again) is CapacityError and str(again) == "node 1: needs 2 GPUs"
    foreign = messages.Failed.from_exception(KeyError("x"))
    assert type(foreign.to_exception()) is EngineError
    assert repr(foreign.to_exception(RankFailed)) == repr(RankFailed("KeyError: 'x'"))


def test_a_request_that_does_not_decode_leaves_the_others() -> None:
    bad = msgspec.structs.replace(REQUEST, id=7, sampling=Sampling(max_tokens=2.0, seed=0))  # type: ignore[arg-type]
    submit, malformed = messages.read_to_engine(messages.encode(messages.Submit([bad, REQUEST])))
    assert submit == messages.Submit([REQUEST])
    assert isinstance(malformed, messages.MalformedRequest) and malformed.id == 7
    assert "max_tokens" in malformed.error
    for message in TO_ENGINE:
        assert messages.read_to_engine(messages.encode(message)) == [message]


def test_a_message_that_names_no_request_is_refused() -> None:
    for content in (messages.encode(messages.Abort(["x"])), messages.encode({"type": "Submit", "requests": [{}]})):  # type: ignore[list-item]
        with pytest.raises(msgspec.ValidationError):
            messages.read_to_engine(content)


@given(st.data())
def test_broken_bytes_are_refused_and_nothing_else(data) -> None:
    decode, kinds = data.draw(st.sampled_from(DIRECTIONS))
    content = bytearray(messages.encode(data.draw(st.sampled_from(kinds))))
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
    _refused_or_a_message(decode, bytes(content), kinds)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(content: bytes) -> None:
    for decode, kinds in DIRECTIONS:
        _refused_or_a_message(decode, content, kinds)


@pytest.mark.parametrize(
    "content", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000, b"\x81\xa1a" * 9999]
)
def test_lengths_that_lie_and_depth_cost_nothing(content: bytes) -> None:
    for decode, kinds in DIRECTIONS:
        _refused_or_a_message(decode, content, kinds)


def _refused_or_a_message(decode, content: bytes, kinds) -> None:
    try:
        found = decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    assert type(found) in {type(message) for message in kinds}
