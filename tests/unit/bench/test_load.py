"""The load generator against a scripted server, so that the expected counts are known."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.load import Target, drive, id_range, positive, single_words, summarise
from bench.workloads import Workload
from serve_llm.cli.bench.client import EventSplitter, StreamUsage, TimedReply
from serve_llm.common.hub import resolve_model

IDS = range(10, 20)


def event(**fields: object) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


CHOICE = {"index": 0, "text": "a", "finish_reason": None}
USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
GOOD = event(choices=[CHOICE]) * 3 + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"


class Script:
    """Answers every POST with the same bytes, split anywhere, and keeps the requests."""

    def __init__(self, body: bytes, status: str = "200 OK") -> None:
        self.body, self.status = body, status
        self.asked: list[dict[str, object]] = []
        self.open = self.most_open = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        self.asked.append(json.loads(await reader.readexactly(length)))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        writer.write(f"HTTP/1.1 {self.status}\r\nConnection: close\r\n\r\n".encode())
        for start in range(0, len(self.body), 50):
            writer.write(self.body[start : start + 50])
            await writer.drain()
            await asyncio.sleep(0)
        self.open -= 1
        writer.close()

    def load(self, workload: Workload, rate: float | None = None):
        async def run():
            server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                return await drive(Target(f"http://127.0.0.1:{port}", "m"), workload, 0, IDS, rate)

        return asyncio.run(run())


def test_events_are_cut_wherever_the_pieces_are() -> None:
    for size in (1, 2, 7, 1000):
        events = EventSplitter()
        found = [data for at in range(0, len(GOOD), size) for data in events.feed(GOOD[at : at + size])]
        assert len(found) == 5 and found[-1] == b"[DONE]" and json.loads(found[0])["choices"] == [CHOICE]


def test_counts_are_those_of_the_usage() -> None:
    script = Script(GOOD)
    result = script.load(Workload("w", streams=2, prompt_tokens=4, output_tokens=3, requests=5))
    assert (result.requests, result.output_tokens, result.errors, result.short) == (5, 15, 0, 0)
    assert result.tokens_per_second == pytest.approx(15 / result.seconds)
    assert 0 < result.ttft_p50 <= result.ttft_p99 < result.seconds and result.itl_p50 >= 0
    assert script.most_open <= 2
    assert all(asked["ignore_eos"] and asked["max_tokens"] == 3 and len(asked["prompt"]) == 4 for asked in script.asked)


def test_the_shared_part_is_sent_once_before_and_not_counted() -> None:
    script = Script(GOOD)
    workload = Workload("w", streams=1, prompt_tokens=2, output_tokens=3, requests=2, shared_tokens=6)
    assert script.load(workload).output_tokens == 6
    assert [len(asked["prompt"]) for asked in script.asked] == [7, 8, 8]
    assert len({tuple(asked["prompt"][:6]) for asked in script.asked}) == 1


def test_texts_are_sampled_alike_and_found_in_no_cache() -> None:
    script = Script(GOOD)
    script.load(
        Workload("w", streams=1, prompt_tokens=0, output_tokens=3, requests=2, texts=[[1], [2, 3]], temperature=0.8)
    )
    assert [asked["prompt"] for asked in script.asked] == [[1], [2, 3]]
    assert {asked["cache_salt"] for asked in script.asked} == {"w 0"}
    assert all((asked["temperature"], asked["top_k"], asked["top_p"]) == (0.8, 0, 1) for asked in script.asked)


def test_random_arrivals_do_not_wait_for_answers() -> None:
    result = Script(GOOD).load(Workload("w", streams=1, prompt_tokens=2, output_tokens=3, requests=8), rate=400.0)
    assert result.requests == 8 and result.errors == 0


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"error": "no such model"}', "404 Not Found", "status 404: .*no such model"),
        (event(choices=[CHOICE]), "200 OK", "closed the connection"),
        (event(error={"message": "out of memory"}) + b"data: [DONE]\n\n", "200 OK", "out of memory"),
        (b"data: nonsense\n\n", "200 OK", "cannot be read"),
        (b"data: [DONE]\n\n", "200 OK", "without tokens"),
    ],
)
def test_what_goes_wrong_is_an_error_with_its_reason(body: bytes, status: str, words: str) -> None:
    result = Script(body, status).load(Workload("w", streams=1, prompt_tokens=2, output_tokens=3, requests=2))
    assert result.errors == 2 and result.requests == 0
    assert result.first_error is not None
    assert re.search(words, result.first_error)


def test_a_server_that_is_not_there_is_an_error() -> None:
    workload = Workload("w", streams=1, prompt_tokens=2, output_tokens=3, requests=1)
    result = asyncio.run(drive(Target("http://127.0.0.1:9", "m"), workload, 0, IDS))
    assert result.errors == 1 and "Connect" in str(result.first_error)


def test_figures_of_a_known_course_of_events() -> None:
    replies = [
        TimedReply(0.0, 4.0, [1.0, 2.0, 4.0], StreamUsage(4, 3)),
        TimedReply(1.0, 5.0, [4.0, 5.0], StreamUsage(4, 2)),
        TimedReply(1.0, 2.0, error="gone"),
    ]
    result = summarise(replies, seconds=5.0, wanted=3, client_seconds=0.5)
    assert (result.output_tokens, result.tokens_per_second, result.short, result.errors) == (5, 1.0, 1, 1)
    assert (result.ttft_p50, result.itl_p50, result.client_cores) == (2.0, 1.0, 0.1)


def test_words_are_as_many_tokens_as_words() -> None:
    path = Path(resolve_model("demo")) / "tokenizer.json"
    words, tokenizer = single_words(path), Tokenizer.from_file(str(path))
    assert len(words) > 100
    ids = list(words)[::7]
    assert tokenizer.encode("".join(words[token_id] for token_id in ids)).ids == ids


def test_values_of_options() -> None:
    assert id_range("300:310") == range(300, 310)
    for wrong in ("300", "9:3", "a:b", "-1:5"):
        with pytest.raises(argparse.ArgumentTypeError):
            id_range(wrong)
    assert positive("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError):
        positive("0")
