"""The openai client with a server that stores responses, files and batches, and is killed -9."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest
from openai import OpenAI
from openai.types import Batch

from support.daemon import START_SECONDS, Daemon

LINES = 300


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    return ["--responses-store", str(tmp_path / "responses.db"), "--batches-dir", str(tmp_path / "batches")]


def connect(daemon: Daemon) -> OpenAI:
    return OpenAI(base_url=daemon.wait_until_serving() + "/v1", api_key="none", max_retries=0)


def kill(daemon: Daemon) -> None:
    """Kill with -9 only the server. Its children end by themselves."""
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    os.kill(daemon.process.pid, signal.SIGKILL)
    daemon.process.wait()
    assert not psutil.wait_procs(children, timeout=60)[1]


def wait_for(
    client: OpenAI, batch_id: str, condition: Callable[[Batch], bool], seconds: float = START_SECONDS
) -> Batch:
    deadline = time.monotonic() + seconds
    while not condition(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline and batch.status in ("validating", "in_progress", "cancelling"), batch
        time.sleep(0.01)
    return batch


def count(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed + batch.request_counts.failed


def read_lines(client: OpenAI, file_id: str | None) -> Iterator[dict[str, object]]:
    return map(json.loads, client.files.content(file_id).text.splitlines() if file_id else [])


def write_requests(path: Path, num_lines: int, max_tokens: int) -> None:
    """Write a file of requests, every tenth of which is refused."""
    body = {"prompt": "def main():\n", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    requests = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body | extra}
        for number in range(num_lines)
        for extra in [{"max_tokens": -1} if number % 10 == 3 else {}]
    ]
    path.write_text("\n".join(map(json.dumps, requests)))


def create_batch(client: OpenAI, path: Path) -> str:
    """Create a batch. Returns its id."""
    file = client.files.create(file=path, purpose="batch", expires_after={"anchor": "created_at", "seconds": 86400})
    assert file.expires_at == file.created_at + 86400
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    return batch.id


@pytest.mark.slow
def test_killed_servers_lose_and_double_no_line(tmp_path: Path, options: list[str]) -> None:
    path = tmp_path / "in.jsonl"
    write_requests(path, LINES, 32)
    batch_id, num_done = "", 0
    for _ in range(2):
        with Daemon("demo", *options, "--max-num-seqs", "8") as daemon, connect(daemon) as client:
            batch_id = batch_id or create_batch(client, path)
            batch = wait_for(client, batch_id, lambda batch, before=num_done: count(batch) > before)  # type: ignore[misc]
            assert batch.status == "in_progress"
            num_done = count(batch)
            kill(daemon)
    with Daemon("demo", *options) as daemon, connect(daemon) as client:
        batch = wait_for(client, batch_id, lambda batch: batch.status == "completed")
        answered = list(read_lines(client, batch.output_file_id))
        failed = list(read_lines(client, batch.error_file_id))
        assert sorted(int(str(line["custom_id"])) for line in answered + failed) == list(range(LINES))
        assert count(batch) == LINES and len(failed) == LINES // 10
        assert len({line["response"]["body"]["choices"][0]["text"] for line in answered}) == 1  # type: ignore[index]
        assert [one.id for one in client.batches.list()] == [batch_id]
        assert batch.output_file_id is not None
        output = client.files.retrieve(batch.output_file_id)
        assert output.expires_at == output.created_at + 3600
        assert {one.id for one in client.files.list()} == {
            batch.input_file_id,
            batch.output_file_id,
            batch.error_file_id,
        }
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)


@pytest.mark.long
def test_ten_thousand_lines_and_five_kills(tmp_path: Path, options: list[str]) -> None:
    """Every line is once in the output or among the errors, whenever the server is killed."""
    num_lines, num_kills = 10_000, 5
    path = tmp_path / "in.jsonl"
    write_requests(path, num_lines, 4)
    batch_id = ""
    for life in range(num_kills + 1):
        with Daemon("demo", *options) as daemon, connect(daemon) as client:
            batch_id = batch_id or create_batch(client, path)
            wanted = num_lines * (life + 1) // (num_kills + 1)
            batch = wait_for(client, batch_id, lambda batch, wanted=wanted: count(batch) >= wanted, 1800.0)  # type: ignore[misc]
            if life < num_kills:
                assert batch.status == "in_progress"
                kill(daemon)
                continue
            batch = wait_for(client, batch_id, lambda batch: batch.status == "completed")
            answered = list(read_lines(client, batch.output_file_id))
            failed = list(read_lines(client, batch.error_file_id))
    assert sorted(int(str(line["custom_id"])) for line in answered + failed) == list(range(num_lines))
    assert count(batch) == num_lines and len(failed) == num_lines // 10


@pytest.mark.slow
def test_the_client_finds_its_responses_again(options: list[str]) -> None:
    with Daemon("demo", *options) as daemon, connect(daemon) as client:
        first = client.responses.create(model="demo", input="Hello", max_output_tokens=8)
        assert client.responses.retrieve(first.id).output_text == first.output_text
        with client.responses.stream(model="demo", input="Go on", previous_response_id=first.id) as stream:
            second = stream.until_done().get_final_response()
        assert second.previous_response_id == first.id
        running = client.responses.create(
            model="demo", input="Write", background=True, max_output_tokens=1500, extra_body={"temperature": 0}
        )
        assert running.status == "queued" and running.background
        ended = client.responses.cancel(running.id)
        assert ended.status in ("cancelled", "completed")
        kill(daemon)
    with Daemon("demo", *options) as daemon, connect(daemon) as client:
        assert client.responses.retrieve(second.id).output_text == second.output_text
        (item,) = client.responses.input_items.list(second.id)
        assert item.content[0].text == "Go on"  # type: ignore[union-attr]
        third = client.responses.create(model="demo", input="More", previous_response_id=second.id, max_output_tokens=8)
        assert third.usage is not None and second.usage is not None
        assert third.usage.input_tokens > second.usage.input_tokens
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="demo", input="More", previous_response_id=third.id)
