"""Traces of requests: spans and attributes, on a scripted engine and with an in-memory exporter."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from serve_llm.common.errors import EngineDead, OptionError
from serve_llm.common.logs import configure
from serve_llm.common.options.sources import make_options
from serve_llm.llm import LLM
from serve_llm.server.app import create_app
from serve_llm.server.assemble import assemble
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.generate.output import OutputProcessor
from serve_llm.server.metrics.meter import Clock, Meter
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.storage.storage import Storage
from serve_llm.server.tracing.start import start_tracing
from serve_llm.server.tracing.tracing import Tracing
from support.asgi import Call
from support.fakes import ScriptedEngine, make_model_info
from support.serving import Served

Open = Callable[..., "Traced"]
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
EMBEDDER = {"generates": False, "pooling_task": "embed", "vector_size": 3}


class Traced(Served):
    """A served app whose spans are kept."""

    exporter: InMemorySpanExporter

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def root(self) -> ReadableSpan:
        (span,) = (span for span in self.spans() if span.kind is SpanKind.SERVER)
        return span

    def children(self) -> list[ReadableSpan]:
        """Return the children in order of their start. All belong to the root's trace, and lie within it."""
        root = self.root()
        children = [span for span in self.spans() if span is not root]
        for child in children:
            assert child.parent is not None and root.context is not None and child.context is not None
            assert child.parent.span_id == root.context.span_id and child.context.trace_id == root.context.trace_id
            assert root.start_time <= child.start_time <= child.end_time <= root.end_time  # type: ignore[operator]
        return sorted(children, key=lambda span: span.start_time or 0)


@pytest.fixture
def serve_traced(model: ServedModel) -> Iterator[Open]:
    """Serve the app on one traced engine: serve_traced(create_app's options={...}, engine options...)."""
    pools = []

    def make(options: dict[str, object] | None = None, **engine: object) -> Traced:
        ids = model.tokenizer.encode("def main():\n    return 1\n", add_special_tokens=False)
        scripted = ScriptedEngine(lambda request: ids, meter=Meter(Clock()), **engine)  # type: ignore[arg-type]
        exporter = InMemorySpanExporter()
        tracing = Tracing(SimpleSpanProcessor(exporter))
        storage = Storage(None, None)
        built = create_app(
            Replicas([scripted]), model, make_options("demo", **(options or {})), storage, tracing=tracing
        )
        pools.append(built.prompts)
        traced = Traced(built.app, built.admission, [scripted], model, storage, built.batches)
        traced.exporter = exporter
        return traced

    yield make
    for pool in pools:
        pool.close()


def test_the_spans_of_a_request(serve_traced: Open) -> None:
    traced = serve_traced(cached_tokens=1)
    body = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3, "n": 2}
    reply = traced.post(
        "/v1/completions", body | {"prompt": "x = 1"}, {"traceparent": PARENT, "X-Request-Id": "request-7"}
    )
    usage = reply.json()["usage"]
    root = traced.root()
    assert root.kind is SpanKind.SERVER and root.status.status_code is StatusCode.UNSET
    assert root.context is not None and root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, "00f067aa0ba902b7")
    assert reply.headers["traceresponse"] == f"00-{TRACE_ID}-{root.context.span_id:016x}-01"
    found = dict(root.attributes or {})
    latencies = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert isinstance(usage, dict) and found == {
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "serve_llm",
        "gen_ai.request.id": "request-7",
        "gen_ai.request.model": "demo",
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.seed": 3,
        "gen_ai.request.top_k": 40.0,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.id": reply.json()["id"],
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "serve_llm.engines": (0,),
    }
    assert root.name == "text_completion demo"
    ends = ("time_to_first_token", "e2e")
    phases = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference")
    assert set(latencies) == {f"gen_ai.latency.{name}" for name in ends + phases}
    assert all(isinstance(value, float) and value >= 0 for value in latencies.values())
    queue, prefill, decode = traced.children()
    assert [queue.name, prefill.name, decode.name] == ["queue", "prefill", "decode"]
    assert all(dict(span.attributes or {}) == {"serve_llm.engines": (0,)} for span in (queue, prefill, decode))
    assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
    resource = dict(root.resource.attributes)
    assert resource["service.name"] == "serve-llm" and resource["service.version"]


def test_a_request_without_context_begins_a_trace(serve_traced: Open) -> None:
    traced = serve_traced()
    assert traced.chat(max_tokens=2, stream=True).headers["traceresponse"]
    assert traced.root().parent is None
    found = traced.root().attributes or {}
    assert found["gen_ai.operation.name"] == "chat" and traced.root().name == "chat demo"
    assert found["gen_ai.request.stream"] is True
    assert found["gen_ai.response.time_to_first_chunk"] == found["gen_ai.latency.time_to_first_token"]


def test_a_seed_beyond_the_numbers_of_attributes_is_omitted(serve_traced: Open) -> None:
    traced = serve_traced()
    assert traced.complete(max_tokens=1, seed=2**64 - 1).status == 200
    assert "gen_ai.request.seed" not in (traced.root().attributes or {})


@pytest.mark.parametrize("header", ["garbage", "00-0-0-01", f"00-{'0' * 32}-00f067aa0ba902b7-01", "\xe9" * 60])
def test_an_invalid_context_is_as_none(serve_traced: Open, header: str) -> None:
    traced = serve_traced()
    reply = traced.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, {"traceparent": header})
    assert reply.status == 200 and traced.root().parent is None


def test_a_trace_that_the_client_does_not_sample_is_not_recorded(serve_traced: Open) -> None:
    traced = serve_traced()
    unsampled = PARENT.removesuffix("01") + "00"
    reply = traced.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, {"traceparent": unsampled})
    assert reply.status == 200 and reply.headers["traceresponse"].startswith(f"00-{TRACE_ID}-")
    assert traced.spans() == []


def test_vectors(serve_traced: Open) -> None:
    traced = serve_traced(model_info=make_model_info(**EMBEDDER))
    traced.engine.script = lambda request: (1.0, 0.0, 0.0)  # type: ignore[assignment,return-value]
    reply = traced.post("/v1/embeddings", {"input": ["a", "b"]})
    assert reply.status == 200 and reply.headers["traceresponse"]
    found = traced.root().attributes or {}
    assert found["gen_ai.operation.name"] == "embeddings" and found["gen_ai.usage.num_sequences"] == 2
    assert "gen_ai.request.temperature" not in found
    assert [span.name for span in traced.children()] == ["queue", "prefill"]


@pytest.mark.parametrize(
    ("body", "headers", "error", "status"),
    [
        ({"prompt": "x", "max_tokens": -1}, {}, "InvalidRequest", StatusCode.UNSET),
        ({"prompt": "x"}, {"X-Request-Timeout": "soon"}, "InvalidRequest", StatusCode.UNSET),
        ({"prompt": "x", "model": "secret name"}, {}, "ModelNotFound", StatusCode.UNSET),
        ({"prompt": "x", "max_tokens": 9}, {"X-Request-Timeout": "0.000000001"}, "DeadlineExceeded", StatusCode.ERROR),
    ],
)
def test_refused_requests(
    serve_traced: Open, body: dict[str, object], headers: dict[str, str], error: str, status: StatusCode
) -> None:
    traced = serve_traced()
    reply = traced.post("/v1/completions", body, headers)
    root = traced.root()
    assert root.context is not None and reply.status >= 400
    assert reply.headers["traceresponse"].startswith(f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-")
    assert root.status.status_code is status and (root.attributes or {})["error.type"] == error
    assert (root.attributes or {})["gen_ai.operation.name"] == "text_completion"
    assert traced.children() == [] and root.events == () and "secret" not in root.to_json()


def test_a_client_that_leaves(serve_traced: Open) -> None:
    traced = serve_traced(automatic=False)

    async def run() -> None:
        call = Call(traced.app, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 9, "stream": True})
        while not traced.engine.open:
            await asyncio.sleep(0)
        traced.engine.step()
        await call.news.wait()
        call.leave()
        await call.finished

    asyncio.run(run())
    root = traced.root()
    assert (root.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
    assert (root.attributes or {})["gen_ai.usage.completion_tokens"] == 1
    assert root.status.status_code is StatusCode.UNSET


def test_a_request_that_is_replayed_twice_is_one_trace(serve_traced: Open) -> None:
    traced = serve_traced(automatic=False)
    replicas: Replicas = traced.admission._replicas  # type: ignore[assignment]
    meter = traced.engine.meter

    def crash(cause: str) -> None:
        replicas.drop_lost({0: []}, EngineDead(cause))

    def restart() -> ScriptedEngine:
        engine = ScriptedEngine(traced.engine.script, automatic=False, meter=meter)
        replicas.join({0: engine})
        return engine

    async def run() -> None:
        body = {"prompt": "x", "max_tokens": 6, "n": 2}
        call = Call(traced.app, "POST", "/v1/completions", body, {"traceparent": PARENT})
        while not traced.engine.open:
            await asyncio.sleep(0)
        traced.engine.step()
        traced.engine.step()
        crash("killed by signal 9")
        restart()
        crash("no heartbeat")  # before the next output
        engine = restart()
        while engine.open:
            engine.step()
        await call.finished

    asyncio.run(run())
    root = traced.root()
    assert root.context is not None and f"{root.context.trace_id:032x}" == TRACE_ID
    assert (root.attributes or {})["serve_llm.num_replays"] == 2
    children = traced.children()
    assert [span.name for span in children] == ["queue", "prefill", "decode", "replay", "replay"]
    first, second = (dict(span.attributes or {}) for span in children[3:])
    (prompt_tokens,) = {len(request.prompt_ids) for request in traced.engine.submitted}
    assert first == {
        "serve_llm.replay.cause": "killed by signal 9",
        "serve_llm.replay.num_sequences": 2,
        "serve_llm.replay.num_tokens": 2 * (prompt_tokens + 2),
        "serve_llm.replay.from_engines": (0,),
        "serve_llm.engines": (0,),
    }
    assert second["serve_llm.replay.cause"] == "no heartbeat"
    assert children[3].end_time == children[4].start_time


def test_log_lines_of_a_traced_request_name_its_span(serve_traced: Open, capsys: pytest.CaptureFixture[str]) -> None:
    traced = serve_traced()
    configure("info", format="json")
    traced.post("/v1/completions", {"prompt": "x", "max_tokens": -1}, {"traceparent": PARENT})
    traced.get("/nowhere")
    refused, unknown = map(json.loads, capsys.readouterr().err.splitlines())
    context = traced.root().context
    assert context is not None and refused["status"] == 400
    assert (refused["trace_id"], refused["span_id"]) == (TRACE_ID, f"{context.span_id:016x}")
    assert unknown["status"] == 404 and "trace_id" not in unknown


def test_an_error_while_outputs_arrive_is_logged_with_the_span(
    serve_traced: Open, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = serve_traced(automatic=False)
    configure("info", format="json")

    def push(*_: object) -> int:
        raise ValueError("a bug")

    async def run() -> None:
        call = Call(traced.app, "POST", "/v1/completions", {"prompt": "x"}, {"traceparent": PARENT})
        while not traced.engine.open:
            await asyncio.sleep(0)
        monkeypatch.setattr(OutputProcessor, "push", push)
        traced.engine.step()
        assert (await call.reply()).status == 500

    asyncio.run(run())
    (record,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert "could not be converted to text" in record["message"] and record["trace_id"] == TRACE_ID
    assert record["request_id"]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "with space.jsonl"
    for _ in range(2):
        tracing = start_tracing(path.as_uri())
        assert tracing is not None
        tracing.start({}, "chat", {}, 0.0, Clock()).fail(ValueError())
        tracing.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] for line in lines] == ["chat", "chat"]
    with pytest.raises(OptionError, match="missing/a: No such file"):
        start_tracing((tmp_path / "missing" / "a").as_uri())


def test_a_file_needs_a_package_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.json.file", None)
    with pytest.raises(OptionError, match="pip install --pre opentelemetry-exporter-otlp-json-file"):
        start_tracing("file:///tmp/traces.jsonl")


def test_without_tracing_there_is_no_header(served: Served) -> None:
    reply = served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, {"traceparent": PARENT})
    assert reply.status == 200 and "traceresponse" not in reply.headers


def test_a_server_without_opentelemetry_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serve_llm.server.tracing.tracing", "serve_llm.server.tracing.request_trace"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    options = make_options("/nonexistent", otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(OptionError, match=r"--otlp-traces-endpoint needs .*opentelemetry.*pip install '\.\[otel\]'"):
        asyncio.run(assemble(options))


def test_the_offline_class_refuses_the_option() -> None:
    with pytest.raises(OptionError, match="only requests over HTTP"):
        LLM("demo", otlp_traces_endpoint="http://localhost:4318/v1/traces")


@pytest.mark.parametrize(
    "value",
    ["localhost:4317", "http://localhost:4318", "grpc://a:1/v1/traces", "http:///x", "file://a.jsonl", "file:///a/", 7],
)
def test_bad_endpoints(value: object) -> None:
    with pytest.raises(OptionError, match="expected a URL with its path"):
        make_options("demo", otlp_traces_endpoint=value)


def test_a_file_takes_the_traces_of_one_process() -> None:
    with pytest.raises(OptionError, match="but --front-ends and --front-end-addr mean more"):
        make_options("demo", otlp_traces_endpoint="file:///tmp/traces.jsonl", front_ends=2)
