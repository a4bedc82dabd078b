"""A run of a job as spans, made of what its log is told; texts of rows are in neither."""

from collections.abc import Mapping
from typing import Any

from raybatch.redaction import redacted
from raybatch.telemetry.providers import flush, tracer

_OPERATIONS = {"generate": "text_completion", "embed": "embeddings"}
# facts of a run by their names in semantic conventions; the others begin with the name below
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
# beside what these are known by, attributes would say the same
_TIMES = ("start_s", "seconds")
_FINISHED = "finished"


class RunTrace:
    """Spans of one run: the job, and in it plans, starts of engines, generation and units.

    Moments are seconds since 1970.
    """

    def __init__(self, tracer: Any, began_s: float) -> None:  # noqa: ANN401 - of an extra
        self._tracer = tracer
        self._began_s = self._free_s = began_s
        self._job: Any = None
        self._generate: Any = None
        self._totals = dict.fromkeys(("rows", "prompt_tokens", "cached_tokens"), 0)
        self._totals |= {"generated_tokens": 0, "errors": 0}
        # ranks to the moment since which they have no engine
        self._gone_s: dict[int, float] = {}

    def tell(self, event: str, now_s: float, values: Mapping[str, Any]) -> None:
        """Take an event of the run's log, in the order in which they happen."""
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
    """Return the trace of a run that begins; None where nobody asks for traces."""
    found = tracer()
    return None if found is None else RunTrace(found, began_s)


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
