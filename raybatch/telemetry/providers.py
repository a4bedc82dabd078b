"""The tracer and the meter of this process, as the variables of OpenTelemetry's SDK ask for them.

OTEL_EXPORTER_OTLP_ENDPOINT switches both on, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and
OTEL_EXPORTER_OTLP_METRICS_ENDPOINT one of them, OTEL_TRACES_EXPORTER=none and
OTEL_METRICS_EXPORTER=none one of them off, OTEL_SDK_DISABLED=true both. The SDK reads all others.
"""

import logging
import threading
import uuid
from functools import cache
from typing import Any, Literal

from raybatch.config import environment
from raybatch.errors import error_text
from raybatch.installation import install_command

logger = logging.getLogger(__name__)

Signal = Literal["traces", "metrics"]

_NAME, _PROTOCOL = "raybatch", "http/protobuf"
# nobody waits longer for a collector that does not answer
_FLUSH_S = 3.0


def is_wanted(signal: Signal) -> bool:
    """Return whether the environment asks for traces or metrics over OTLP."""
    of_process, name = environment(), signal.upper()
    ends = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    is_off = of_process.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_none = of_process.get(f"OTEL_{name}_EXPORTER", "").lower() == "none"
    return any(of_process.get(end) for end in ends) and not (is_off or is_none)


def tracer() -> Any | None:  # noqa: ANN401 - of an extra
    """Return what begins spans; None where nobody asks for traces."""
    provider = _provider("traces")
    return None if provider is None else provider.get_tracer(_NAME)


def meter() -> Any | None:  # noqa: ANN401 - of an extra
    """Return what makes instruments; None where nobody asks for metrics."""
    provider = _provider("metrics")
    return None if provider is None else provider.get_meter(_NAME)


def flush(signal: Signal) -> None:
    """Send what was not sent yet; waits for some seconds at most."""
    if is_wanted(signal) and (provider := _provider(signal)) is not None:
        # exporters wait longer than they are told to
        sending = threading.Thread(target=provider.force_flush, daemon=True)
        sending.start()
        sending.join(_FLUSH_S)


def _warn_of_protocol(signal: Signal) -> None:
    of_process, name = environment(), signal.upper()
    names = (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((of_process[n] for n in names if of_process.get(n)), _PROTOCOL)
    if protocol != _PROTOCOL:
        logger.warning(
            "raybatch sends %s as %s and not as %s: the endpoint must take HTTP, which collectors "
            "do at port 4318",
            signal,
            _PROTOCOL,
            protocol,
        )


@cache
def _provider(signal: Signal) -> Any | None:  # noqa: ANN401 - of an extra
    if not is_wanted(signal):
        return None
    _warn_of_protocol(signal)
    try:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(signal)
    except ValueError as error:
        logger.warning(
            "a variable of OpenTelemetry is wrong, so no %s are sent: %s", signal, error_text(error)
        )
        return None
    except ImportError as error:
        logger.warning(
            "the environment asks for OpenTelemetry, and %s is not installed, so nothing is sent: "
            "%s",
            error.name,
            install_command("otel"),
        )
        return None
    # the SDK's own end retries for many seconds; whoever ends has called `flush`
    if signal == "metrics":
        reader = PeriodicExportingMetricReader(exporter)
        return MeterProvider([reader], resource=_resource(), shutdown_on_exit=False)
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(signal: Signal) -> Any:  # noqa: ANN401 - of an extra
    if signal == "metrics":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _resource() -> Any:  # noqa: ANN401 - of an extra
    """Return what tells this process from others; names of the environment win."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    # counters of two processes must not look like one that falls back
    ours = Resource({"service.name": _NAME, "service.instance.id": uuid.uuid4().hex})
    return Resource.create().merge(ours).merge(OTELResourceDetector().detect())
