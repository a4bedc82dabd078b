"""A run as spans."""

import http.server
import threading

import pyarrow as pa
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from raybatch import telemetry
from raybatch.actors.pool import release_pools
from raybatch.telemetry import RunTrace
from tests.jobs import local_job
from tests.stages.support import fake_stage, write_parquet
from tests.telemetry.conftest import SWITCH

UNIT = {
    "unit": 4,
    "rows": 10,
    "errors": 1,
    "prompt_tokens": 50,
    "cached_tokens": 20,
    "generated_tokens": 30,
    "start_s": 3.0,
    "seconds": 2.0,
    "host": "h",
}


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    yield provider
    provider.shutdown()


@pytest.fixture
def trace(provider):
    return RunTrace(provider.get_tracer("t"), 100.0)


def send(trace, *events):
    for event, now_s, values in events:
        trace.tell(event, now_s, values)


def by_name(spans):
    return {span.name: span for span in spans.get_finished_spans()}


def times_of(span):
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_run_is_a_tree_of_spans(trace, spans):
    about = {"model": "m", "task": "generate", "backend": "vllm", "versions": {"ray": "1"}}
    send(
        trace,
        ("run_started", 100.0, about),
        ("replica", 101.5, {"rank": 0, "state": "ready"}),
        ("planned", 102.0, {"rows": 10, "units": 1}),
        ("unit_done", 106.0, UNIT),
        ("run_ended", 107.0, {"reason": "finished", "seconds": 7.0}),
    )
    found = by_name(spans)
    assert {name: times_of(span) for name, span in found.items()} == {
        "raybatch job": (100.0, 107.0),
        "start engine": (100.0, 101.5),
        "plan": (100.0, 102.0),
        "generate": (102.0, 107.0),
        "unit": (103.0, 105.0),
    }
    parents = {name: span.parent and span.parent.span_id for name, span in found.items()}
    job, generate = (found[name].context.span_id for name in ("raybatch job", "generate"))
    assert parents.pop("raybatch job") is None
    assert parents.pop("unit") == generate
    assert set(parents.values()) == {job}
    assert found["unit"].attributes == {
        "raybatch.unit": 4,
        "raybatch.rows": 10,
        "raybatch.errors": 1,
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.cache_read.input_tokens": 20,
        "gen_ai.usage.output_tokens": 30,
        "host.name": "h",
    }
    attributes = found["raybatch job"].attributes
    assert attributes["gen_ai.request.model"] == "m"
    assert attributes["gen_ai.provider.name"] == "vllm"
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.usage.output_tokens"] == 30
    assert found["raybatch job"].status.is_ok


def test_a_run_that_failed_has_an_error_and_its_secrets_are_left_out(trace, spans):
    secret = "https://user:hunter2@host/path"
    send(
        trace,
        ("run_started", 100.0, {"source": secret}),
        ("run_ended", 101.0, {"reason": f"failed: cannot read {secret}"}),
    )
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert "hunter2" not in span.to_json()


def test_a_restarted_engine_has_a_second_start_span(trace, spans):
    send(
        trace,
        ("run_started", 100.0, {}),
        ("replica", 101.0, {"rank": 2, "state": "ready"}),
        ("replica", 105.0, {"rank": 2, "state": "gone"}),
        ("replica", 108.0, {"rank": 2, "state": "ready"}),
        ("stopping", 109.0, {"limit": "SIGTERM"}),
        ("run_ended", 110.0, {"reason": "finished"}),
    )
    *starts, job = spans.get_finished_spans()
    assert [times_of(span) for span in starts] == [(100.0, 101.0), (105.0, 108.0)]
    assert [event.name for event in job.events] == ["engine gone", "stopping"]


def test_a_second_plan_begins_where_the_first_has_ended(trace, spans):
    send(
        trace,
        ("run_started", 100.0, {}),
        ("planned", 101.0, {}),
        ("planned", 105.0, {}),
        ("run_ended", 110.0, {"reason": "finished"}),
    )
    found = [(span.name, times_of(span)) for span in spans.get_finished_spans()]
    assert found[:3] == [
        ("plan", (100.0, 101.0)),
        ("generate", (101.0, 105.0)),
        ("plan", (105.0, 105.0)),
    ]


def write_texts(folder):
    texts = [f"secret question {i}" for i in range(40)]
    write_parquet(folder / "in" / "a.parquet", pa.table({"text": texts}))


def test_a_job_is_traced_without_a_text_of_its_rows(
    monkeypatch, tmp_path, model, provider, spans, locally
):
    monkeypatch.setenv(SWITCH, "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setattr(telemetry, "_provider", {"traces": provider}.get)
    write_texts(tmp_path)
    stage = fake_stage(model, prompt="{text}", replicas=1)
    plan = {"unit_rows": 10, "max_unit_rows": 10}
    local_job(tmp_path / "in", tmp_path / "out", stage, plan=plan).run()
    found = spans.get_finished_spans()
    assert [span.name for span in found].count("unit") == 4
    assert {"raybatch job", "plan", "generate"} <= {span.name for span in found}
    assert len({span.context.trace_id for span in found}) == 1
    assert not [span for span in found if "secret question" in span.to_json()]
    assert by_name(spans)["generate"].attributes["raybatch.rows"] == 40


class Collector(http.server.BaseHTTPRequestHandler):
    """Records request bodies by path."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_spans_and_metrics_reach_a_collector(monkeypatch, tmp_path, model, locally):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.received = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(SWITCH, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    write_texts(tmp_path)
    stage = fake_stage(model, prompt="{text}", replicas=1, fake={"max_num_seqs": 9})
    local_job(tmp_path / "in", tmp_path / "out", stage).run()
    release_pools()  # sends their last metrics before the next test
    for provider in map(telemetry._provider, ("traces", "metrics")):
        provider.shutdown()
    server.shutdown()
    server.server_close()
    assert {"/v1/traces", "/v1/metrics"} == {path for path, _ in server.received}
    received = b"".join(body for _, body in server.received)
    for name in (b"raybatch job", b"generate", b"raybatch_rows_total", b"raybatch_kv_usage_ratio"):
        assert name in received
