"""The dashboard is what its script writes, shows every series of a pool, and has a layout."""

import json
import re
import sys
from itertools import combinations
from pathlib import Path

import pytest

from raybatch.actors.coordinator.counters import PoolMetrics, ReplicaMetrics

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import write_dashboard  # noqa: E402

DASHBOARD = json.loads(write_dashboard.FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


class Registry:
    """Keeps which series there are, with their labels."""

    def __init__(self):
        self.labels = {}

    def _make(self, name, *, tag_keys, **_):
        self.labels[f"ray_{name}"] = set(tag_keys)

    Counter = Gauge = _make

    def Histogram(self, name, *, tag_keys, **_):  # noqa: N802 - as Ray names it
        for end, labels in (("bucket", {"le"}), ("sum", set()), ("count", set())):
            self.labels[f"ray_{name}_{end}"] = {*tag_keys, *labels}


@pytest.fixture(scope="module")
def labels():
    registry = Registry()
    PoolMetrics(registry)
    ReplicaMetrics(0, registry)
    return registry.labels


def named(text):
    return re.findall(r"\bray_\w+", text)


def test_the_file_is_what_the_script_writes():
    again = "run: python scripts/write_dashboard.py"
    assert write_dashboard.dashboard() == write_dashboard.FILE.read_text(), again


def test_queries_name_series_that_a_pool_has_and_all_of_them(labels):
    of_queries = {name for query in QUERIES for name in named(query)}
    others = {"ray_raybatch_unit_seconds_sum", "ray_raybatch_unit_seconds_count"}
    assert of_queries == set(labels) - others


def test_labels_and_variables_are_there(labels):
    for query in QUERIES:
        found = {label for name in named(query) for label in labels[name]}
        selected = re.findall(r"(\w+)=~?\"", query)
        grouped = [n for by in re.findall(r"by \(([^)]*)\)", query) for n in by.split(", ")]
        assert {*selected, *grouped} <= found, query
        for name, selector in re.findall(r"(ray_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=", selector)) <= labels[name], query
        known = {*VARIABLES, "__rate_interval"}
        assert set(re.findall(r"\$(\w+)", query)) <= known, query
    for panel in PANELS:
        of_series = {
            label for t in panel["targets"] for n in named(t["expr"]) for label in labels[n]
        }
        shown = {n for t in panel["targets"] for n in re.findall(r"{{(\w+)}}", t["legendFormat"])}
        assert shown <= of_series, panel["title"]
    for name in ("stage", "replica"):
        series, label = re.fullmatch(
            r"label_values\((\w+), (\w+)\)", VARIABLES[name]["query"]
        ).groups()
        assert label == name
        assert label in labels[series]


@pytest.mark.parametrize("query", QUERIES)
def test_counters_are_read_by_their_growth_or_as_sums(query):
    assert query.count("(") == query.count(")")
    for name in set(named(query)):
        if name.endswith("_bucket"):
            assert f"rate({name}" in query
        elif name.endswith("_total"):
            assert re.search(rf"(rate|sum)\({name}", query)
        else:
            assert f"rate({name}" not in query


def test_panels_lie_on_the_grid_and_none_covers_another():
    cells = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(0 <= c["x"] and c["x"] + c["w"] <= 24 and c["h"] > 0 for c in cells)
    for a, b in combinations(cells, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (a, b)
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_no_line_of_panels_has_a_gap_on_its_left():
    rows = {}
    for cell in (panel["gridPos"] for panel in DASHBOARD["panels"]):
        rows.setdefault(cell["y"], []).append(cell)
    for cells in rows.values():
        ends = 0
        for cell in sorted(cells, key=lambda c: c["x"]):
            assert cell["x"] == ends
            ends += cell["w"]
