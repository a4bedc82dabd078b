"""The text of a chosen plan."""

from raybatch.explanation.bench_plan import plan_section
from raybatch.pictures.document import to_page, to_text
from raybatch.policy.batches.layer_plan import MemoryBudget, Workload
from raybatch.policy.batches.search import PlanGrid, gate_target, search_plans
from raybatch.policy.residence import WeightSizes, plan_residence
from tests.policy.layers import MODEL, costs

DECODE = Workload(cached_tokens=500)
MEMORY = MemoryBudget(device_bytes=3 * 10**9, host_bytes=50 * 10**9)
GRID = PlanGrid(attention_tokens=(8, 64), gate_tokens=(64, 2048), parameter_buffers=(None, 4))


def section(*, memory=MEMORY, bandwidth=1e9, saturated=1024, residence=None):
    found = costs(link_bytes_per_s=bandwidth)
    result = search_plans(MODEL, found, DECODE, memory, GRID)
    target = gate_target(MODEL, result.best.plan, DECODE, memory, saturated_tokens=saturated)
    return plan_section(
        "decode", result, costs=found, memory=memory, target=target, residence=residence
    )


def test_a_plan_on_the_device_says_so():
    facts = dict(section().facts)
    assert "decode: 64 tokens at the gate, attention over 64 at a time" == facts["plan"]
    assert "on the device" == facts["parameters"] == facts["KV"]
    assert "of 3 GB on the device, 0 of 50 GB on the host" in facts["memory"]


def test_what_keeps_experts_from_being_busy_is_named():
    told = dict(section().facts)["experts"]
    assert told.startswith("kept busy by 1,024 tokens; limited to ")
    assert told.endswith(" by device memory")
    assert "which fit" in dict(section(saturated=16).facts)["experts"]


def test_streamed_experts_and_kv_on_the_host_are_told():
    small = MemoryBudget(device_bytes=10**9, host_bytes=50 * 10**9)
    facts = dict(section(memory=small, bandwidth=1e13).facts)
    assert "experts on the host, streamed through 4 buffers" == facts["parameters"]
    assert "on the host, two sub-batches on the device" == facts["KV"]


def test_the_table_has_a_row_for_each_way_to_place_the_data():
    table = section().table
    assert 4 == len(table.rows)
    assert {("device", "device"), ("device", "host"), ("host", "device"), ("host", "host")} == {
        (row[0], row[-1]) for row in table.rows
    }
    per_token = [float(row[5].replace(",", "")) for row in table.rows]
    assert per_token == sorted(per_token)


def test_one_way_to_place_the_data_has_no_table():
    assert section(memory=MemoryBudget(device_bytes=3 * 10**9)).table is None


def test_the_section_is_printed_and_put_on_a_page():
    text = to_text("plan", [section()])
    assert "us/token" in text
    assert "of which memory does not hold" in text
    assert "us/token" in to_page("plan", [section()])


def test_streamed_layers_are_not_said_to_be_on_the_device():
    sizes = WeightSizes(other_bytes=1, layer_bytes=(10,) * 6)
    residence = plan_residence(sizes, device_weight_bytes=41, weight_buffers=1)
    facts = dict(section(residence=residence).facts)
    told = "3 of 6 layers on the device, the others streamed through 1 buffer"
    assert (told, "on the device") == (facts["parameters"], facts["KV"])
    kept = [row[0] for row in section(residence=residence).table.rows]
    assert ["host", "host", "some streamed", "some streamed"] == sorted(kept)
