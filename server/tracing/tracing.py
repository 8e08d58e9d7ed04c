"""OpenTelemetry traces: which spans exist, and how they are exported.

Imported only with --otlp-traces-endpoint, because OpenTelemetry's SDK is an optional dependency.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from urllib.parse import unquote, urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_llm.server.metrics.meter import Clock
from serve_llm.server.tracing.request_trace import RequestTrace, name_operation, to_nanoseconds


def create_exporting_processor(endpoint: str) -> SpanProcessor:
    """Return a processor that exports finished spans in a thread. endpoint: URL that accepts traces by OTLP over HTTP,
    or that of a file.

    Raises OSError if the file cannot be opened.
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "file":
        return BatchSpanProcessor(_create_file_exporter(unquote(parts.path)))
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


def _create_file_exporter(path: str) -> SpanExporter:
    """Appends a line of OTLP in JSON for each batch of spans."""
    from opentelemetry.exporter.otlp.json.file import FileSpanExporter  # in a separate package

    exporter: SpanExporter = FileSpanExporter(path)
    return exporter


class Tracing:
    """Starts the traces of one server."""

    def __init__(self, processor: SpanProcessor) -> None:
        """processor: gets each span when it ends."""
        package_version = version("serve-llm")
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come last and win.
        resource = Resource.create({"service.name": "serve-llm", "service.version": package_version})
        resource = resource.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("serve_llm", package_version)
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self, headers: Mapping[str, str], job: str, attributes: Mapping[str, str], arrival: float, clock: Clock
    ) -> RequestTrace:
        """Start the span of a request, as a child of the span that its headers name (W3C Trace Context).

        job: one of `server.prompt.jobs.JOBS`. arrival: clock time.
        """
        operation = name_operation(job)
        standard = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "serve_llm"}
        epoch_offset = time.time_ns() - to_nanoseconds(clock.read())
        span = self._tracer.start_span(
            operation,
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {**standard, **attributes},
            start_time=epoch_offset + to_nanoseconds(arrival),
        )
        return RequestTrace(self._tracer, span, operation, arrival, clock, epoch_offset)

    def stop(self) -> None:
        """Export finished spans, which may take as long as the collector's answer."""
        self._provider.shutdown()
