"""What stages compare and count: tokens, floors, and steps whose groups share blocks."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from gpu_call.ceilings import measured_limits
from gpu_call.engine import beside
from gpu_call.models import DENSE, spec_of
from gpu_call.stage import Stage
from gpu_call.steps import Case
from gpu_call.steps_of_rows import Groups, decode_step, grouped_step, mixed_step, num_blocks

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
    assert [part.query_idx.tolist() for part in plan.contexts] == [[0, 1], [2, 3]]
    shared = [block for part in plan.contexts for block in part.block_ids.tolist()]
    assert len({*shared, *plan.decode.block_ids.tolist()}) == 2 * 2 + 4 * 2 == num_blocks(batch, 4)
    assert batch.positions.tolist() == [12] * 4
    assert GROUPS.num_read == 2 * 8 + 4 * 5
    assert sum(GROUPS.lens) == 4 * 13


def test_prompts_beside_groups_have_blocks_of_their_own():
    batch = mixed_step(GROUPS, [6], block_size=4)
    assert (batch.attention.num_decode, len(batch.attention.contexts)) == (4, 2)
    assert batch.logits_idx.tolist() == [0, 1, 2, 3, 9]
    assert batch.slot_mapping[4:].min() == 4 * num_blocks(grouped_step(GROUPS, 4), 4)
    assert num_blocks(decode_step([5], 4), 4) == 2


def test_limits_are_measured_where_no_stage_has_found_them(tmp_path):
    stage = Stage(name="steps", device="cpu", end=0.0, work=tmp_path)
    limits = measured_limits(stage)
    assert limits.operations_per_s > 1e6
    assert limits.bytes_per_s > 1e6


def test_what_the_host_has_stands_before_the_wheels_of_the_peer(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError")
    (tmp_path / "of_the_peer.py").touch()
    code = (
        "import sys; from pathlib import Path; from gpu_call.peer import use_behind_host; "
        "use_behind_host(Path(sys.argv[1])); sys.modules.pop('numpy'); import numpy, of_the_peer"
    )
    path = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})


def test_the_script_of_the_peer_puts_no_wheels_into_the_path(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "path $PYTHONPATH"\necho "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu_peer.sh"), "10"],
        env=os.environ | {"PYTHON": str(python), "OUT": str(tmp_path), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    path, arguments = done.stdout.splitlines()
    assert "site" not in path
    assert "--site" in arguments
