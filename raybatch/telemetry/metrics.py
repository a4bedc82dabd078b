"""What `ray.util.metrics` makes, for OpenTelemetry beside Ray, or for nobody."""

from collections.abc import Callable, Mapping
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


# of Ray's classes: how OpenTelemetry makes such an instrument, and what takes a value in each
_KINDS = {
    "Counter": ("create_counter", "add", "inc"),
    "Gauge": ("create_gauge", "set", "set"),
    "Histogram": ("create_histogram", "record", "observe"),
}


class _Both:
    """An instrument of OpenTelemetry, and one of Ray's beside it, with the methods of Ray's."""

    def __init__(self, *take: Callable[[float, Tags], object]) -> None:
        self._take = take

    def inc(self, value: float = 1, tags: Tags = None) -> None:
        """Pass a value on to both."""
        for take in self._take:
            take(value, tags)

    set = observe = inc


class OtelMetrics:
    """Makes each series for OpenTelemetry, and for another registry beside it."""

    def __init__(self, meter: Any, beside: Any) -> None:  # noqa: ANN401
        self._meter = meter
        self._beside = beside

    def __getattr__(self, kind: str) -> Callable[..., _Both]:
        make, take, method = _KINDS[kind]

        def made(name: str, *, description: str, **options: Any) -> _Both:  # noqa: ANN401
            bounds = options.get("boundaries")
            advice = {} if bounds is None else {"explicit_bucket_boundaries_advisory": bounds}
            ours = getattr(self._meter, make)(name, description=description, **advice)
            other = getattr(self._beside, kind)(name, description=description, **options)
            return _Both(getattr(ours, take), getattr(other, method))

        return made


def metrics_of_process(beside: Any | None = None) -> Any:  # noqa: ANN401 - a module or like one
    """Return what makes the series of this process: `beside`, and OpenTelemetry where it is on."""
    others = NoMetrics() if beside is None else beside
    found = meter()
    return others if found is None else OtelMetrics(found, others)
