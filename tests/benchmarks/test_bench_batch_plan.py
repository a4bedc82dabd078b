"""The grid beside the plan, and what is told of it; engines are measured by the script alone."""

from argparse import Namespace

import batch_plan
import models
import pytest
from batch_plan import BATCHED_TOKENS, WAYS, Choice, grid, measure, table, turns


def test_the_planned_sizes_come_first_and_once():
    known, other = Choice(BATCHED_TOKENS[0], None, None), Choice(77, None, None)
    assert [other, *grid(known)] == grid(other)
    assert known == grid(known)[0]
    assert len(BATCHED_TOKENS) * len(WAYS) == len(grid(known)) == len(set(grid(known)))


def test_every_choice_has_its_turn_in_each_repetition_and_none_is_always_first():
    found = list(turns("abcd", 2))
    assert list("abcdcdab") == found


def row(tokens, seconds):
    choice = Choice(tokens, None, None)
    return {**choice._asdict(), "cpu_s": [seconds], "median_cpu_s": seconds, "differing_rows": 0}


def test_the_table_has_the_fastest_first_and_marks_the_planned_one():
    rows = [row(512, 1.5), row(256, 2.0), row(1024, 1.4)]
    found = {"planned": rows[0], "grid": rows, "planned_over_best": 1.5 / 1.4}
    lines = table("tiny", found).splitlines()
    assert "tiny: planned / best = 1.071" == lines[0]
    assert ["1024", "512", "256"] == [line.split()[1] for line in lines[1:]]
    assert [False, True, False] == ["planned" in line for line in lines[1:]]


@pytest.mark.slow
def test_a_small_model_is_planned_and_measured_with_equal_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(batch_plan, "BATCHED_TOKENS", (64,))
    models.write("moe-8m", tmp_path / "model")
    options = Namespace(requests=2, prompt_len=20, output_len=3, repetitions=1)
    found = measure(tmp_path / "model", options)
    assert 1 <= found["planned_over_best"]
    assert [0] * 5 == [one["differing_rows"] for one in found["grid"]]
