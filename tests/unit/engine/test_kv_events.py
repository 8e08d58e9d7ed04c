"""Events of the prefix cache: a subscriber knows what the cache holds, and lost batches are replayed."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from serve_llm.common.errors import OptionError
from serve_llm.common.options.kv_events import KVEventsConfig
from serve_llm.engine.kv_events import KVEventPublisher, offset_endpoint
from serve_llm.engine.scheduler.kv_events import AllBlocksCleared
from support.engine import generate, greedy, make_engine
from support.tiny import make_checkpoint

TIMEOUT_MS = 60_000


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_socket(stack: ExitStack, kind: int, address: str) -> zmq.Socket[bytes]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    opened = context.socket(kind)
    stack.callback(opened.close, linger=0)
    opened.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    if kind == zmq.SUB:
        opened.setsockopt(zmq.SUBSCRIBE, b"")
    opened.connect(address)
    return opened


def replay(stack: ExitStack, address: str, first: int) -> list[tuple[int, Any]]:
    """Request the batches from a number on, as vLLM's clients do."""
    dealer = open_socket(stack, zmq.DEALER, address)
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while True:
        _, number, payload = dealer.recv_multipart()
        if not payload:
            assert number == b"\xff" * 8
            return found
        found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


def test_a_subscriber_knows_what_is_cached(tmp_path: Path, sockets: ExitStack) -> None:
    """With a small cache, sliding windows and host memory."""
    vocab_size = make_checkpoint(tmp_path, "gemma3_text")
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv",
    }
    options: dict[str, object] = {"block_size": 8, "max_model_len": 96, "max_num_batched_tokens": 64}
    kv_cache_config = make_engine(tmp_path, **options).kv_cache_config
    num_blocks = kv_cache_config.blocks_per_request(96, 64) + 2
    sizes = {
        "kv_cache_memory": num_blocks * kv_cache_config.block_bytes,
        "kv_offload_memory": 20 * kv_cache_config.block_bytes,
    }
    engine = make_engine(tmp_path, **options, **sizes, kv_events_config=events)
    sockets.callback(engine.close)
    subscriber = open_socket(sockets, zmq.SUB, f"ipc://{tmp_path}/events")
    rng = random.Random(1)
    texts = [[rng.randrange(1, vocab_size) for _ in range(rng.randrange(20, 60))] for _ in range(12)]
    generate(engine, [greedy(number, text, 9) for number, text in enumerate(texts)])
    generate(engine, [greedy(100 + number, text, 9) for number, text in enumerate(texts)])

    batches = replay(sockets, f"ipc://{tmp_path}/replay", 0)
    assert [number for number, _ in batches] == list(range(len(batches)))
    assert batches[0][1][1][0] == {"type": "AllBlocksCleared"}
    assert replay(sockets, f"ipc://{tmp_path}/replay", len(batches) - 2) == batches[-2:]
    known: dict[str, set[tuple[int, int]]] = {"GPU": set(), "CPU": set()}
    tokens: dict[tuple[int, int], list[int]] = {}
    for _, (_, found, rank) in batches:
        assert rank == 0
        for event in found:
            if event["type"] == "AllBlocksCleared":
                continue
            keys = [(event["group_idx"], block_hash) for block_hash in event["block_hashes"]]
            if event["type"] == "BlockRemoved":
                assert known[event["medium"]].issuperset(keys)
                known[event["medium"]].difference_update(keys)
                continue
            known[event["medium"]].update(keys)
            if event["medium"] == "GPU":
                before = tokens.get((event["group_idx"], event["parent_block_hash"]), [])
                size = event["block_size"]
                assert len(event["token_ids"]) == size * len(keys)
                for place, key in enumerate(keys):
                    tokens.setdefault(key, before + event["token_ids"][: (place + 1) * size])
    cached = {(index, int.from_bytes(digest[-8:], "big")) for index, digest in engine.scheduler._pool._cached}
    assert known["GPU"] == cached and known["CPU"]
    texts_of_group = [ids for (index, _), ids in tokens.items() if index == 0]
    assert all(any(text[: len(ids)] == ids[: len(text)] for text in texts) for ids in texts_of_group)

    while not subscriber.poll(200):  # events may get lost until it has connected
        generate(engine, [greedy(200, [rng.randrange(1, vocab_size) for _ in range(20)], 2)])
    topic, number, payload = subscriber.recv_multipart()
    replayed = dict(replay(sockets, f"ipc://{tmp_path}/replay", 0))
    assert topic == b"kv" and msgspec.msgpack.decode(payload) == replayed[int.from_bytes(number, "big")]


def test_a_full_queue_loses_batches_and_not_their_numbers(
    tmp_path: Path, sockets: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_send = threading.Event()
    send = KVEventPublisher._send

    def send_later(publisher: KVEventPublisher, numbered: Any) -> None:
        assert may_send.wait(60.0)
        send(publisher, numbered)

    monkeypatch.setattr(KVEventPublisher, "_send", send_later)
    address = f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=address, max_queue_size=2)
    publisher = KVEventPublisher(config, 0)
    sockets.callback(publisher.close)
    for _ in range(9):
        publisher.publish([AllBlocksCleared()])
    publisher.publish([])
    may_send.set()
    while publisher._queue.qsize():
        pass
    publisher.publish([AllBlocksCleared()])
    numbers: list[int] = []
    while 9 not in numbers:
        numbers = [number for number, _ in replay(sockets, address, 0)]
    assert 3 <= len(numbers) <= 4 and numbers == sorted(numbers)


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        config = KVEventsConfig(endpoint="tcp://*:0", replay_endpoint=address)
        with pytest.raises(OptionError, match=f"--kv-events-config: {address}: Address already in use"):
            KVEventPublisher(config, 0)


def test_engines_have_addresses_of_their_own() -> None:
    assert offset_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert offset_endpoint("tcp://*:5557", 3) == "tcp://*:5560"
    assert offset_endpoint("ipc:///run/events", 2) == "ipc:///run/events_dp2"
