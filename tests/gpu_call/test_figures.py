"""What stages compare and count: tokens, floors, and steps whose groups share blocks."""

import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from gpu_call.ceilings import measured_limits
from gpu_call.engine import beside
from gpu_call.models import DENSE, spec_of
from gpu_call.peer import compared, results_of
from gpu_call.stage import Stage
from gpu_call.steps import Case
from gpu_call.steps_of_rows import Groups, decode_step, grouped_step, mixed_step, num_blocks

from raybatch.bench.gpu import ROWS_ON_GPU

ROOT = Path(__file__).parents[2]
GROUPS = Groups(num_rows=4, rows_per_group=2, shared_tokens=8, own_tokens=5)


def test_rows_are_compared_up_to_the_first_token_that_differs():
    found = beside([(1, 2, 3), (4, 5, 6), (7, 8, 9)], [(1, 2, 3), (4, 0, 6), (0, 8, 9)])
    assert (found["equal_rows"], found["rows"]) == (1, 3)
    assert found["first_divergence"] == [None, 1, 0]


def test_behind_the_last_keys_the_floor_counts_rows_with_logits():
    spec = replace(
        spec_of(DENSE, num_layers=1),
        model_dim=2,
        num_heads=3,
        num_kv_heads=1,
        head_dim=5,
        ffn_dim=7,
        vocab_size=11,
    )
    batch = mixed_step([4], [10], block_size=4)
    case = Case(batch=batch, lens=[4], prompts=[10], num_read=4)
    # keys and values of 11 rows; q, o, the block and the head of 2; 14 pairs of a row and a key
    rows, logits = 2 * 11 * (2 * 2 * 5), 2 * 2 * (2 * 2 * 15 + 3 * 2 * 7 + 11 * 2)
    assert case.operations(spec) == rows + logits + 4 * 14 * 15
    assert case.operations(replace(spec, num_layers=2, windows=(None,) * 2)) == (
        case.operations(spec) + 4 * 59 * 15 + 2 * 11 * (2 * 2 * 5 + 2 * 2 * 15 + 3 * 2 * 7)
    )


def test_groups_read_what_they_share_once():
    batch = grouped_step(GROUPS, block_size=4)
    plan = batch.attention
    assert [part.query_idx.tolist() for part in plan.segments] == [[0, 1], [2, 3]]
    shared = [block for part in plan.segments for block in part.block_ids.tolist()]
    assert len({*shared, *plan.decode.block_ids.tolist()}) == 2 * 2 + 4 * 2 == num_blocks(batch, 4)
    assert batch.positions.tolist() == [12] * 4
    assert GROUPS.num_read == 2 * 8 + 4 * 5
    assert sum(GROUPS.lens) == 4 * 13


def test_prompts_beside_groups_have_blocks_of_their_own():
    batch = mixed_step(GROUPS, [6], block_size=4)
    assert (batch.attention.num_decode, len(batch.attention.segments)) == (4, 2)
    assert batch.logits_idx.tolist() == [0, 1, 2, 3, 9]
    assert batch.slot_mapping[4:].min() == 4 * num_blocks(grouped_step(GROUPS, 4), 4)
    assert num_blocks(decode_step([5], 4), 4) == 2


def test_limits_are_measured_where_no_stage_has_found_them(tmp_path):
    stage = Stage(name="steps", device="cpu", end=0.0, work=tmp_path)
    limits = measured_limits(stage)
    assert limits.operations_per_s > 1e6
    assert limits.bytes_per_s > 1e6


PEER = ROOT / "scripts" / "gpu_peer.sh"


def test_wheels_of_the_peer_are_found_behind_what_the_host_has(tmp_path):
    """Also by processes that others start."""
    python = tmp_path / "python"
    code = "import sys; print([p for p in sys.path if p.endswith('/site')], sys.path[-1][-5:])"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    python.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(inner)}\n")
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "OUT": str(tmp_path), "PYTHONPATH": ""}
    done = subprocess.run(
        [str(PEER), "10"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("/site'") == 1
    assert done.stdout.strip().endswith("/site")


def test_the_peer_says_what_it_takes():
    done = subprocess.run([str(PEER), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr[:26]) == (2, "usage: gpu_peer.sh SECONDS")


def test_results_of_an_engine_that_is_cut_off_are_kept():
    """With what it has started, which holds the pipe; half of a line is none."""
    code = (
        "import subprocess, sys, time; print('{\"a\": 1}', flush=True); print('x {', flush=True); "
        "sys.stdout.write('{\"b\": {}'); sys.stdout.flush(); "
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    found = list(results_of([sys.executable, "-c", code], seconds=2.0))
    assert found == [{"a": 1}, {"a": 1, "failed": -9}]


def test_what_an_engine_has_started_ends_with_it(tmp_path):
    """Also where the engine failed by itself, as the next one needs the memory of the GPU."""
    alive = tmp_path / "alive"
    late = f"import time, pathlib; time.sleep(4); pathlib.Path({str(alive)!r}).touch()"
    code = (
        f"import subprocess as s, sys; s.Popen([sys.executable, '-c', {late!r}], stdout=s.DEVNULL);"
        "sys.exit(3)"
    )
    assert list(results_of([sys.executable, "-c", code], seconds=60.0)) == [{"failed": 3}]
    time.sleep(6)
    assert not alive.exists()


def test_engines_are_compared_where_both_have_a_result():
    first, second, *_ = ROWS_ON_GPU
    runs = {
        "dense, native": {"seconds": {first.name: [2.0, 4.0, 3.0], second.name: [1.0]}},
        "dense, vllm": {"seconds": {first.name: [6.0]}},
    }
    lines = compared("dense", runs)
    assert lines[0].endswith(": 200%")
    assert lines[1].endswith("vLLM no result")
