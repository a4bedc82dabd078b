"""Variables that switch traces and metrics on; without them nothing is loaded."""

import atexit
import subprocess
import sys

import pytest

from raybatch import telemetry
from raybatch.installation import install_command
from raybatch.telemetry import metrics_of_process, run_trace
from tests.telemetry.conftest import SWITCH

HERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("variables", "traces", "metrics"),
    [
        ({}, False, False),
        ({SWITCH: HERE}, True, True),
        ({SWITCH: ""}, False, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": HERE}, True, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": HERE}, False, True),
        ({SWITCH: HERE, "OTEL_METRICS_EXPORTER": "none"}, True, False),
        ({SWITCH: HERE, "OTEL_SDK_DISABLED": "TRUE"}, False, False),
    ],
    ids=str,
)
def test_variables_of_the_sdk_switch_both_on_and_off(monkeypatch, variables, traces, metrics):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (telemetry.is_wanted("traces"), telemetry.is_wanted("metrics")) == (traces, metrics)


def test_without_the_variables_nothing_is_loaded():
    code = (
        "import sys; import raybatch.actors.executors.local_pools, raybatch.job.job\n"
        "from raybatch.telemetry import metrics_of_process\n"
        "from raybatch.telemetry import run_trace\n"
        "metrics_of_process(); assert run_trace(0.0) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_missing_package_is_reported_once_and_stops_nothing(monkeypatch, caplog):
    monkeypatch.setenv(SWITCH, HERE)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert run_trace(0.0) is None
    assert run_trace(0.0) is None
    assert caplog.text.count(install_command("otel")) == 1
    assert metrics_of_process().meter is None


def test_a_process_has_its_own_id_and_the_users_service_name(monkeypatch):
    first, second = (telemetry._resource().attributes for _ in range(2))
    assert first["service.name"] == "raybatch"
    assert first["service.instance.id"] != second["service.instance.id"]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=data")
    found = telemetry._resource().attributes
    assert (found["service.name"], found["team"]) == ("nightly", "data")


@pytest.fixture
def fresh_providers():
    telemetry._provider.cache_clear()
    yield
    telemetry._provider.cache_clear()


@pytest.mark.usefixtures("fresh_providers")
def test_an_end_of_the_sdk_that_waits_for_a_dead_collector_is_not_registered(monkeypatch):
    monkeypatch.setenv(SWITCH, HERE)
    before = atexit._ncallbacks()
    made = [telemetry._provider(signal) for signal in ("traces", "metrics")]
    assert None not in made
    assert atexit._ncallbacks() == before


@pytest.mark.usefixtures("fresh_providers")
def test_an_unsupported_protocol_is_reported(monkeypatch, caplog):
    monkeypatch.setenv(SWITCH, "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert telemetry._provider("traces") is not None
    assert "as http/protobuf and not as grpc" in caplog.text


@pytest.mark.usefixtures("fresh_providers")
def test_a_wrong_variable_is_reported_and_stops_nothing(monkeypatch, caplog):
    monkeypatch.setenv(SWITCH, HERE)

    def refuse(signal):
        raise ValueError("invalid literal for int(): 'ten'")

    monkeypatch.setattr(telemetry, "_exporter", refuse)
    assert telemetry._provider("metrics") is None
    assert "sending no metrics" in caplog.text
