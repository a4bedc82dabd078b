"""What `ray.util.metrics` makes, for OpenTelemetry beside Ray, or for nobody."""

from collections.abc import Mapping, Sequence
from typing import Any

from raybatch.telemetry.providers import meter

Tags = Mapping[str, str] | None


class _Uncounted:
    def inc(self, value: float = 1, tags: Tags = None) -> None:
        """Count nothing."""

    set = observe = inc


class NoMetrics:
    """Stands for `ray.util.metrics` where nobody collects metrics."""

    def Counter(self, name: str, **_: Any) -> _Uncounted:  # noqa: ANN401, N802 - as Ray names it
        """Return a counter that counts nothing."""
        return _Uncounted()

    Gauge = Histogram = Counter


class _Instrument:
    """An instrument of OpenTelemetry with the methods of Ray's, and one of Ray's beside it."""

    def __init__(self, take: Any, method: str, beside: Any) -> None:  # noqa: ANN401
        self._take = take
        self._beside = getattr(beside, method)

    def inc(self, value: float = 1, tags: Tags = None) -> None:
        """Pass a value on to both."""
        self._take(value, tags)
        self._beside(value, tags)

    set = observe = inc


class OtelMetrics:
    """Makes each series for OpenTelemetry, and for another registry beside it."""

    def __init__(self, meter: Any, beside: Any) -> None:  # noqa: ANN401
        self._meter = meter
        self._beside = beside

    def Counter(self, name: str, *, description: str, tag_keys: Sequence[str]) -> _Instrument:  # noqa: N802
        """Return a counter."""
        counter = self._meter.create_counter(name, description=description)
        beside = self._beside.Counter(name, description=description, tag_keys=tag_keys)
        return _Instrument(counter.add, "inc", beside)

    def Gauge(self, name: str, *, description: str, tag_keys: Sequence[str]) -> _Instrument:  # noqa: N802
        """Return a gauge."""
        gauge = self._meter.create_gauge(name, description=description)
        beside = self._beside.Gauge(name, description=description, tag_keys=tag_keys)
        return _Instrument(gauge.set, "set", beside)

    def Histogram(  # noqa: N802
        self, name: str, *, description: str, boundaries: Sequence[float], tag_keys: Sequence[str]
    ) -> _Instrument:
        """Return a histogram."""
        histogram = self._meter.create_histogram(
            name, description=description, explicit_bucket_boundaries_advisory=boundaries
        )
        beside = self._beside.Histogram(
            name, description=description, boundaries=boundaries, tag_keys=tag_keys
        )
        return _Instrument(histogram.record, "observe", beside)


def metrics_of_process(beside: Any | None = None) -> Any:  # noqa: ANN401 - a module or like one
    """Return what makes the series of this process: `beside`, and OpenTelemetry where it is on."""
    others = NoMetrics() if beside is None else beside
    found = meter()
    return others if found is None else OtelMetrics(found, others)
