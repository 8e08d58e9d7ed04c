"""The files of run-batch: what is refused before anything runs, and how a run resumes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from serve_llm.common.errors import OptionError, ServeError
from serve_llm.server.batches import files
from serve_llm.server.batches.files import LINE_BYTES, BatchInput, BatchOutput
from serve_llm.server.batches.lines import build_result
from serve_llm.server.batches.local_call import LocalResponse

REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
BODY_BYTES = 1000

# A fault in the second line of the input -> what the error names.
HOSTILE = [
    (b"{", "line of a batch"),
    (b"[]", "object"),
    (b"null", "object"),
    (b"1e999", "line of a batch"),
    (b"\xff", "line of a batch"),
    (b"[" * 5000, "line of a batch"),
    (b"a" * (BODY_BYTES + LINE_BYTES + 1), "longer than"),
    ({"custom_id": None}, "custom_id"),
    ({"custom_id": 7}, "custom_id"),
    ({"custom_id": ""}, "custom_id"),
    ({"custom_id": "first"}, "is not the first"),
    ({"custom_id": ["a"]}, "custom_id"),
    ({"method": "GET"}, "method"),
    ({"method": "post"}, "method"),
    ({"method": None}, "method"),
    ({"url": "/v1/files"}, "url"),
    ({"url": "/v1/completions/"}, "url"),
    ({"url": "/v1/completions?a=b"}, "url"),
    ({"url": "http://other/v1/completions"}, "url"),
    ({"url": "../health"}, "url"),
    ({"url": 3}, "url"),
    (b'{"custom_id": "b"}', "method"),
    (b'{"custom_id": "b", "method": "POST", "url": "/v1/completions"}', "body"),
    (b'{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"a": }}', "line of a batch"),
    (b'{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {}} {}', "line of a batch"),
    (b'{"custom_id": "\\ud800", "method": "POST", "url": "/v1/completions", "body": {}}', "line of a batch"),
]


def write_input(path: Path, *lines: bytes | dict[str, object]) -> BatchInput:
    encoded = [line if isinstance(line, bytes) else json.dumps(REQUEST | line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return BatchInput(path, BODY_BYTES)


def result(custom_id: str) -> bytes:
    return build_result(custom_id, LocalResponse(200, {"x-request-id": "r"}, b'{"choices":[]}'))


def test_the_event_loop_may_run_between_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads a file releases the interpreter's lock after each line, however long the file is."""
    events: list[str] = []
    for name, parse in (("parse_request", files.parse_request), ("parse_result", files.parse_result)):
        monkeypatch.setattr(files, name, lambda line, parse=parse: (events.append("line"), parse(line))[1])
    monkeypatch.setattr(files, "yield_gil", lambda: events.append("way"))
    names = [str(number) for number in range(3000)]
    requests = write_input(tmp_path / "in", *({"custom_id": name} for name in names))
    assert len(requests.read_ids()) == len(names)
    assert [one.custom_id for one in requests.read(names[:-1])] == names[-1:]
    (tmp_path / "out").write_bytes(b"".join(map(result, names)))
    output = BatchOutput(tmp_path / "out")
    assert len(output.read_ids()) == len(names)
    output.close()
    assert events == ["line", "way"] * 3 * len(names)


@pytest.mark.parametrize(("line", "named"), HOSTILE)
def test_an_invalid_line_is_named(tmp_path: Path, line: bytes | dict[str, object], named: str) -> None:
    requests = write_input(tmp_path / "in", {"custom_id": "first"}, line)
    with pytest.raises(OptionError, match=named) as caught:
        requests.read_ids()
    assert "line 2" in str(caught.value)


def test_the_requests_that_are_not_done(tmp_path: Path) -> None:
    requests = write_input(tmp_path / "in", {"custom_id": "1"}, b"", b"  \r", {"custom_id": "2"}, {"custom_id": "3"})
    assert requests.read_ids() == {"1", "2", "3"}
    left = list(requests.read({"2"}))
    assert [request.custom_id for request in left] == ["1", "3"]
    assert msgspec.json.decode(left[0].body) == REQUEST["body"]


@pytest.mark.parametrize(
    ("line", "param"),
    [
        ({"body": None}, "body"),
        ({"body": []}, "body"),
        ({"body": "{}"}, "body"),
        ({"body": {"prompt": "x", "stream": True}}, "stream"),
        ({"body": {"prompt": "x", "stream": "no"}}, "stream"),
        ({"body": {"prompt": "x", "background": True}}, "background"),
        ({"priority": 3}, "priority"),
        ({"x" * 1000: 3}, "x" * 100),
    ],
)
def test_a_fault_of_one_request_is_its_own(tmp_path: Path, line: dict[str, object], param: str) -> None:
    requests = write_input(tmp_path / "in", {"custom_id": "1"}, line)
    assert requests.read_ids() == {"1", "a"}
    good, bad = requests.read(set())
    assert good.refusal is None and bad.refusal is not None
    assert bad.refusal.param == param and param in bad.refusal.message


def test_a_byte_order_mark_is_skipped_at_the_start_only(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(REQUEST) + "\n", encoding="utf-8-sig")
    assert BatchInput(path, BODY_BYTES).read_ids() == {"a"}
    path.write_bytes(path.read_bytes() + path.read_bytes())
    with pytest.raises(OptionError, match="line 2"):
        BatchInput(path, BODY_BYTES).read_ids()


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--input-file"):
        BatchInput(tmp_path / "none", BODY_BYTES).read_ids()


@pytest.mark.parametrize("kept", [1, 10, 40, len(result("b")) - 1])
def test_a_torn_last_line_is_removed(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "out"
    path.write_bytes(result("a") + result("b")[:kept])
    output = BatchOutput(path)
    assert output.read_ids() == {"a"}
    output.append(result("b"))
    output.close()
    again = BatchOutput(path)
    assert again.read_ids() == {"a", "b"}
    again.close()


@pytest.mark.parametrize("content", [b"precious", b"precious\n", b'{"a": 1}\n', b'{"id":"batch_x'])
def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    output = BatchOutput(path)
    with pytest.raises(OptionError, match="not a result"):
        output.read_ids()
    output.close()
    assert path.read_bytes() == content


def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    first = BatchOutput(tmp_path / "out")
    with pytest.raises(OptionError, match="another run-batch"):
        BatchOutput(tmp_path / "out")
    first.close()
    BatchOutput(tmp_path / "out").close()


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--output-file"):
        BatchOutput(tmp_path / "none" / "out")


def test_nothing_is_appended_to_a_torn_line() -> None:
    output = BatchOutput(Path("/dev/full"))
    with pytest.raises(ServeError, match="No space left"):
        output.append(result("a"))
    with pytest.raises(ServeError, match="after an error"):
        output.append(result("b"))
    output.close()
