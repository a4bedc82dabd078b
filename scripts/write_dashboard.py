"""Write deploy/grafana/raybatch.json, a dashboard of the metrics that a pool exports through Ray.

    python scripts/write_dashboard.py

tests/telemetry/test_dashboard.py checks that the file is up to date and that its metrics exist.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "raybatch.json"
_WIDTH, _STAT_HEIGHT, _GRAPH_HEIGHT = 24, 4, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF_STAGE, _OF_REPLICA = '{stage=~"$stage"}', '{replica=~"$replica"}'


class Query(NamedTuple):
    expr: str
    legend: str = ""


class Panel(NamedTuple):
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    text: str = ""
    """What the panel shows, and what to do about it."""


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]
    kind: str = "timeseries"


def _series(name: str, labels: str = "") -> str:
    return f"ray_raybatch_{name}{labels}"


def _total(name: str, labels: str = _OF_STAGE) -> str:
    return f"sum({_series(name, labels)})"


def _rate(name: str, labels: str = _OF_STAGE, by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({_series(name, labels)}[$__rate_interval]))"


def _each(name: str) -> Query:
    return Query(_series(name, _OF_REPLICA), "engine {{replica}}")


def _each_rate(name: str, legend: str) -> Query:
    return Query(_rate(name, _OF_REPLICA, "replica"), f"{legend}, engine {{{{replica}}}}")


def _quantile(share: float) -> Query:
    rate = f"sum by (le) (rate({_series('unit_seconds_bucket')}[$__rate_interval]))"
    return Query(f"histogram_quantile({share}, {rate})", f"{share:.0%}")


_FAILED = '{stage=~"$stage",status="error"}'
ROWS = (
    Row(
        "So far",
        (
            Panel("Rows done", (Query(_total("rows_total")),)),
            Panel(
                "Error rows",
                (Query(f"{_total('rows_total', _FAILED)} or vector(0)"),),
                text="The column __inference_error__ has the reasons.",
            ),
            Panel("Generated tokens", (Query(_total("generated_tokens_total")),)),
            Panel(
                "Prompt tokens from the cache",
                (Query(f"{_total('cached_tokens_total')} / {_total('prompt_tokens_total')}"),),
                "percentunit",
                "Compare it with the hit rate that `raybatch explain` forecasts.",
            ),
            Panel("Engines", (Query(f"count({_series('running_requests')})"),)),
            Panel(
                "Engine restarts",
                (
                    Query(f"{_total('replica_restarts_total', '')} or vector(0)", "all"),
                    Query(f"{_total('replica_hung_total', '')} or vector(0)", "hung"),
                ),
                text="Restarts after a crash or a hang; the log of the job has the reasons.",
            ),
        ),
        "stat",
    ),
    Row(
        "Throughput",
        (
            Panel(
                "Tokens per second",
                (
                    Query(_rate("prompt_tokens_total"), "prompt"),
                    Query(_rate("cached_tokens_total"), "of these from the cache"),
                    Query(_rate("generated_tokens_total"), "generated"),
                ),
                text="The tokens of a row count when the row is done.",
            ),
            Panel("Rows per second", (Query(_rate("rows_total", by="status"), "{{status}}"),)),
            Panel(
                "Prefix hits",
                (
                    Query(
                        f"{_rate('cached_tokens_total')} / {_rate('prompt_tokens_total')}", "hits"
                    ),
                ),
                "percentunit",
            ),
            Panel(
                "Cost of answers", (Query(_total("cost_total"), "so far"),), text="Of endpoints."
            ),
        ),
    ),
    Row(
        "Engines",
        (
            Panel("KV cache in use", (_each("kv_usage_ratio"),), "percentunit"),
            Panel(
                "Running requests",
                (_each("running_requests"),),
                text="An engine with 0 while others run lacks rows.",
            ),
            Panel("Requests waiting in the engine", (_each("waiting_requests"),)),
            Panel(
                "Preemptions per second",
                (
                    _each_rate("preemptions_total", "preempted"),
                    _each_rate("swapped_tokens_total", "tokens brought back"),
                    _each_rate("rounded_tokens_total", "of these in 8 bits"),
                ),
                text="If there are many: more KV memory, or a lower max_num_seqs.",
            ),
        ),
    ),
    Row(
        "Units of commit",
        (
            Panel("Units per second", (Query(_rate("units_total", "", "state"), "{{state}}"),)),
            Panel("Seconds of a unit", (_quantile(0.5), _quantile(0.95)), "s"),
        ),
    ),
    Row(
        "The last rows",
        (
            Panel(
                "Rows that move, and rows that run twice",
                (
                    Query(_total("moved_rows_total", ""), "moved"),
                    Query(_total("duplicated_rows_total", ""), "run twice"),
                    Query(_total("won_duplicates_total", ""), "of these, the second was first"),
                ),
                text="Rows go from the engine that would end last to an engine with room.",
            ),
            Panel("KV that moves", (Query(_rate("moved_kv_bytes_total", ""), "copied"),), "Bps"),
            Panel("TP group steps per second", (Query(_rate("team_steps_total", ""), "steps"),)),
            Panel("TP groups so far", (Query(_total("teams_total", ""), "teams"),)),
        ),
    ),
    Row(
        "Steps",
        (
            Panel(
                "Steps by CUDA graph, and without one",
                (
                    Query(_rate("graph_steps_total", _OF_REPLICA), "graph"),
                    Query(_rate("eager_steps_total", _OF_REPLICA, "reason"), "eager: {{reason}}"),
                ),
            ),
            Panel("CUDA graphs captured", (_each("captured_graphs"),)),
            Panel(
                "Accepted draft tokens",
                (
                    Query(
                        f"{_rate('accepted_tokens_total', _OF_REPLICA)} / "
                        f"{_rate('drafted_tokens_total', _OF_REPLICA)}",
                        "accepted",
                    ),
                ),
                "percentunit",
            ),
            Panel(
                "Endpoints",
                (
                    _each("endpoint_concurrency"),
                    _each_rate("endpoint_retries_total", "retries per second"),
                ),
                text="Samples that may be in flight, and requests that are retried.",
            ),
        ),
    ),
    Row(
        "Copies between host and device",
        (
            Panel("KV", (Query(_rate("swapped_bytes_total", _OF_REPLICA), "copied"),), "Bps"),
            Panel(
                "Weights", (Query(_rate("weight_copy_bytes_total", _OF_REPLICA), "copied"),), "Bps"
            ),
            Panel(
                "Layers per second",
                (
                    Query(_rate("weight_copies_total", _OF_REPLICA), "copied"),
                    Query(_rate("weight_stalls_total", _OF_REPLICA), "waited for"),
                ),
            ),
            Panel(
                "Rounds of weight-sharing groups",
                (
                    Query(_rate("rounds_total", _OF_REPLICA), "rounds"),
                    Query(_rate("dummy_rounds_total", _OF_REPLICA), "without rows"),
                    Query(_rate("served_rows_total", _OF_REPLICA), "rows of others, by layer"),
                ),
            ),
            Panel(
                "Sent in rounds", (Query(_rate("round_bytes_total", _OF_REPLICA), "sent"),), "Bps"
            ),
            Panel("Copies that failed", (_each_rate("failed_copies_total", "failed"),)),
        ),
    ),
)


def dashboard() -> str:
    """Return the dashboard as JSON text."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        at = {"h": 1, "w": _WIDTH, "x": 0, "y": top}
        panels.append({"type": "row", "title": row.title, "gridPos": at, "collapsed": False})
        top += 1
        height = _STAT_HEIGHT if row.kind == "stat" else _GRAPH_HEIGHT
        per_line = len(row.panels) if row.kind == "stat" else 2
        width = _WIDTH // per_line
        for number, panel in enumerate(row.panels):
            line, place = divmod(number, per_line)
            at = {"h": height, "w": width, "x": place * width, "y": top + line * height}
            panels.append(_panel(panel, row.kind, at))
        top += -(-len(row.panels) // per_line) * height
    for number, made in enumerate(panels, 1):
        made["id"] = number
    content = {
        "title": "raybatch",
        "uid": "raybatch",
        "tags": ["ray", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _panel(panel: Panel, kind: str, at: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
    return {
        "type": kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    of_label = {"stage": "rows_total", "replica": "running_requests"}
    choices = [
        {
            "name": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": f"label_values({_series(name)}, {label})",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for label, name in of_label.items()
    ]
    return [{"name": "datasource", "type": "datasource", "query": "prometheus"}, *choices]


if __name__ == "__main__":
    FILE.write_text(dashboard())
