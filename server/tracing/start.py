"""Start traces if the optional dependency is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve_llm.common.errors import OptionError

if TYPE_CHECKING:
    from serve_llm.server.tracing.tracing import Tracing

EXPORT_SECONDS = 2.0  # time for the last spans to be sent when a process stops


def start_tracing(endpoint: str | None) -> Tracing | None:
    """Return None without an endpoint. Raises OptionError if OpenTelemetry is not installed, or a file cannot be
    written."""
    if endpoint is None:
        return None
    try:
        from serve_llm.server.tracing.tracing import Tracing, create_exporting_processor
    except ModuleNotFoundError as error:
        raise OptionError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is missing): "
            "pip install '.[otel]' in the repository"
        ) from None
    try:
        processor = create_exporting_processor(endpoint)
    except ModuleNotFoundError as error:
        raise OptionError(
            f"--otlp-traces-endpoint {endpoint} needs OpenTelemetry's exporter to files ({error.name} is missing): "
            "pip install --pre opentelemetry-exporter-otlp-json-file"
        ) from None
    except OSError as error:
        raise OptionError(f"--otlp-traces-endpoint {endpoint}: {error.strerror}") from None
    return Tracing(processor)
