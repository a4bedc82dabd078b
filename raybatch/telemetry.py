"""Traces and metrics for OpenTelemetry, configured by the environment variables of its SDK.

OTEL_EXPORTER_OTLP_ENDPOINT switches both on, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and
OTEL_EXPORTER_OTLP_METRICS_ENDPOINT one of them, OTEL_TRACES_EXPORTER=none and
OTEL_METRICS_EXPORTER=none one of them off, OTEL_SDK_DISABLED=true both. The SDK reads all others.
"""

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import cache, partialmethod
from typing import Any, Literal

from raybatch.config import environment
from raybatch.errors import error_text
from raybatch.installation import install_command
from raybatch.redaction import redacted

logger = logging.getLogger(__name__)

Signal = Literal["traces", "metrics"]
Tags = Mapping[str, str] | None

_NAME, _PROTOCOL = "raybatch", "http/protobuf"
# longest wait for a collector
_FLUSH_S = 3.0
# by Ray's class: OpenTelemetry's factory method, its update method, and Ray's
_KINDS = {
    "Counter": ("create_counter", "add", "inc"),
    "Gauge": ("create_gauge", "set", "set"),
    "Histogram": ("create_histogram", "record", "observe"),
}
_OPERATIONS = {"generate": "text_completion", "embed": "embeddings"}
# values with names of semantic conventions; others get the prefix below
_NAMES = {
    "model": "gen_ai.request.model",
    "backend": "gen_ai.provider.name",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "generated_tokens": "gen_ai.usage.output_tokens",
    "host": "host.name",
    "pid": "process.pid",
}
_OWN = "raybatch."
# values that span times already express
_TIMES = ("start_s", "seconds")
_FINISHED = "finished"


def is_wanted(signal: Signal) -> bool:
    """Return whether the environment enables traces or metrics over OTLP."""
    of_process, name = environment(), signal.upper()
    ends = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    is_off = of_process.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_none = of_process.get(f"OTEL_{name}_EXPORTER", "").lower() == "none"
    return any(of_process.get(end) for end in ends) and not (is_off or is_none)


def flush(signal: Signal) -> None:
    """Export pending data; waits for some seconds at most."""
    if is_wanted(signal) and (provider := _provider(signal)) is not None:
        # exporters exceed their timeouts
        sending = threading.Thread(target=provider.force_flush, daemon=True)
        sending.start()
        sending.join(_FLUSH_S)


def _warn_of_protocol(signal: Signal) -> None:
    of_process, name = environment(), signal.upper()
    names = (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((of_process[n] for n in names if of_process.get(n)), _PROTOCOL)
    if protocol != _PROTOCOL:
        logger.warning(
            "raybatch sends %s as %s and not as %s: the endpoint must accept HTTP, as collectors "
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
            "sending no %s: invalid environment variable of OpenTelemetry: %s",
            signal,
            error_text(error),
        )
        return None
    except ImportError as error:
        logger.warning(
            "sending nothing: the environment enables OpenTelemetry, and %s is not installed: %s",
            error.name,
            install_command("otel"),
        )
        return None
    # the SDK's exit handler retries for many seconds; `flush` is called before
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
    """Return the resource that identifies this process; names of the environment win."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    # counters of two processes must not look like one that falls back
    ours = Resource({"service.name": _NAME, "service.instance.id": uuid.uuid4().hex})
    return Resource.create().merge(ours).merge(OTELResourceDetector().detect())


class _Instrument:
    """Forwards values to instruments of OpenTelemetry and Ray, with the methods of Ray's."""

    def __init__(self, *take: Callable[[float, Tags], object]) -> None:
        self._take = take

    def inc(self, value: float = 1, tags: Tags = None) -> None:
        """Pass a value on to all instruments."""
        for take in self._take:
            take(value, tags)

    set = observe = inc


class Metrics:
    """Creates instruments like `ray.util.metrics`, for OpenTelemetry and for the module `beside`.

    If both are None, values are dropped.
    """

    def __init__(self, meter: Any | None = None, beside: Any | None = None) -> None:  # noqa: ANN401
        self.meter = meter
        self.beside = beside

    def _made(self, kind: str, name: str, *, description: str = "", **options: Any) -> _Instrument:  # noqa: ANN401
        make, take, method = _KINDS[kind]
        takers = []
        if self.meter is not None:
            bounds = options.get("boundaries")
            advice = {} if bounds is None else {"explicit_bucket_boundaries_advisory": bounds}
            ours = getattr(self.meter, make)(name, description=description, **advice)
            takers.append(getattr(ours, take))
        if self.beside is not None:
            other = getattr(self.beside, kind)(name, description=description, **options)
            takers.append(getattr(other, method))
        return _Instrument(*takers)

    Counter = partialmethod(_made, "Counter")
    Gauge = partialmethod(_made, "Gauge")
    Histogram = partialmethod(_made, "Histogram")


def metrics_of_process(beside: Any | None = None) -> Any:  # noqa: ANN401 - a module or like one
    """Return the metrics factory of this process: `beside`, and OpenTelemetry if enabled."""
    provider = _provider("metrics")
    if provider is None:
        return Metrics() if beside is None else beside
    return Metrics(provider.get_meter(_NAME), beside)


class RunTrace:
    """Spans of one run: the job with its plans, engine starts, generation and commit units.

    Pass it the events of the run's log with `tell`; times are in seconds since 1970.
    """

    def __init__(self, tracer: Any, began_s: float) -> None:  # noqa: ANN401 - of an extra
        self._tracer = tracer
        self._began_s = self._free_s = began_s
        self._job: Any = None
        self._generate: Any = None
        self._totals = dict.fromkeys(("rows", "prompt_tokens", "cached_tokens"), 0)
        self._totals |= {"generated_tokens": 0, "errors": 0}
        # by rank, the time since which it has no engine
        self._gone_s: dict[int, float] = {}

    def tell(self, event: str, now_s: float, values: Mapping[str, Any]) -> None:
        """Export an event of the run's log; call it in the order of the log."""
        if event == "run_started":
            self._job = self._begin("raybatch job", self._began_s, values)
        elif event == "planned":
            self._end_generate(now_s)
            self._span("plan", self._free_s, now_s, values)
            self._generate = self._begin("generate", now_s, {})
        elif event == "unit_done":
            start_s = self._began_s + values["start_s"]
            self._span("unit", start_s, start_s + values["seconds"], values)
            for name in self._totals:
                self._totals[name] += values[name]
        elif event == "replica":
            self._replica(now_s, values)
        elif event == "stopping":
            self._job.add_event(event, _attributes(values), _ns(now_s))
        elif event == "run_ended":
            self._end(now_s, values)

    def _replica(self, now_s: float, values: Mapping[str, Any]) -> None:
        rank = values["rank"]
        if values["state"] == "ready":
            since_s = self._gone_s.pop(rank, self._began_s)
            self._span("start engine", since_s, now_s, {"rank": rank})
        else:
            self._gone_s[rank] = now_s
            self._job.add_event("engine gone", _attributes({"rank": rank}), _ns(now_s))

    def _end(self, now_s: float, values: Mapping[str, Any]) -> None:
        from opentelemetry.trace import StatusCode

        self._end_generate(now_s)
        reason = str(values["reason"])
        if reason != _FINISHED:
            self._job.set_status(StatusCode.ERROR, redacted(reason))
        self._job.set_attributes(_attributes({"end": reason, **self._totals}))
        self._job.end(_ns(now_s))
        flush("traces")

    def _end_generate(self, now_s: float) -> None:
        if self._generate is not None:
            self._generate.set_attributes(_attributes(self._totals))
            self._generate.end(_ns(now_s))
            self._generate, self._free_s = None, now_s

    def _begin(self, name: str, start_s: float, values: Mapping[str, Any]) -> Any:  # noqa: ANN401
        from opentelemetry.trace import set_span_in_context

        above = self._generate if name == "unit" else self._job
        context = None if above is None else set_span_in_context(above)
        attributes = _attributes(values)
        return self._tracer.start_span(
            name, context=context, attributes=attributes, start_time=_ns(start_s)
        )

    def _span(self, name: str, start_s: float, end_s: float, values: Mapping[str, Any]) -> None:
        self._begin(name, start_s, values).end(_ns(end_s))


def run_trace(began_s: float) -> RunTrace | None:
    """Return the trace of a new run; None if traces are off."""
    provider = _provider("traces")
    return None if provider is None else RunTrace(provider.get_tracer(_NAME), began_s)


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for name, value in values.items():
        if name == "task" and value in _OPERATIONS:
            attributes["gen_ai.operation.name"] = _OPERATIONS[value]
        elif name not in _TIMES and isinstance(value, str | bool | int | float):
            clean = redacted(value) if isinstance(value, str) else value
            attributes[_NAMES.get(name, _OWN + name)] = clean
    return attributes


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
