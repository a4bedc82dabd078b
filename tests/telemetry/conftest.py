"""Providers as the environment asks for them, without a collector."""

import pytest

from raybatch import telemetry

provider_of_process = telemetry._provider

SWITCH = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Let each test begin without providers, and leave none behind."""
    for name in (SWITCH, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    provider_of_process.cache_clear()
    yield
    for signal in ("traces", "metrics"):
        if (provider := provider_of_process(signal)) is not None:
            provider.shutdown()
    provider_of_process.cache_clear()
