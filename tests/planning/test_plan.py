"""The plan of a source: what the driver makes in memory, and what tasks make of its pieces."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from raybatch.config import PlanConfig
from raybatch.durable.units import row_sums
from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from raybatch.planning import tasks
from raybatch.planning.fingerprint import fingerprint
from raybatch.planning.planned import ArrangeJob, ProbedRows, RunSpec
from raybatch.planning.probe import estimate, probe_rows
from raybatch.planning.run import RowDescriber, fit_units, gather, plan_gathered, run_small
from raybatch.planning.shards import SHARD_SCHEMA, digest_of, rows_in_stretches, shard_of, stretches
from raybatch.planning.store import (
    StoredPlan,
    read_plan,
    read_shards,
    read_units,
    write_plan,
    write_shard,
)
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.plan import choose_parts, cut_values
from raybatch.records.types import Sampling
from raybatch.rows.plan_columns import check_names, take_off
from raybatch.rows.prepare import column_row_ids
from tests.stages.support import fake_stage, write_parquet

BLOCK = 8
PLAN = PlanConfig(unit_rows=8, max_unit_rows=16)


def document_rows(num_documents=6, questions=4, *, seed=0):
    """Draw questions about documents in random order, with a null, an empty text and a copy."""
    rng = np.random.default_rng(seed)
    texts = []
    for document in range(num_documents):
        text = f"{document} document " * 3
        texts += [text + f"question {q}" for q in range(questions - document % 3)]
    texts = [texts[i] for i in rng.permutation(len(texts))]
    texts[1:1] = [None, texts[0], ""]
    return pa.table({"id": [f"r{i}" for i in range(len(texts))], "text": texts})


def run_spec(folder, model, table=None, *, plan=PLAN, **options):
    table = document_rows() if table is None else table
    for start in range(0, table.num_rows, 7):
        write_parquet(folder / "in" / f"{start:03d}.parquet", table.slice(start, 7))
    options = {"prompt": "{text}", "engine": {"block_size_tokens": BLOCK}, **options}
    stage = fake_stage(model, id_column="id", **options)
    return RunSpec(
        source=scan_source(str(folder / "in")),
        config=stage.config,
        plan=plan,
        sink=str(folder / "out"),
        row_id_column=None,
        fingerprint=fingerprint(stage.config, table.schema),
    )


class Handed:
    """Keeps what a small run hands over."""

    def __init__(self):
        self.tables = []

    def todo(self, stored, planned):
        return np.ones(stored.num_units, np.bool_)

    def run(self, stored, tables):
        self.tables.extend(tables)


def units_of(job):
    """Return the tables that a small run hands over, in order, and its plan."""
    handed = Handed()
    planned = run_small(replace(job, units=handed), None)
    return handed.tables, planned


@pytest.fixture
def small(tmp_path, model):
    job = run_spec(tmp_path, model)
    rows = gather(job)
    return job, rows, plan_gathered(rows, job.config, job.plan)


def test_units_hold_every_row_once_with_its_columns_and_prompt(small):
    job, rows, _ = small
    tables, _ = units_of(job)
    assert rows.table.num_rows == sum(table.num_rows for table in tables)
    by_id = dict(zip(*(rows.table.column(c).to_pylist() for c in ("id", "text")), strict=True))
    for table in tables:
        user, what = take_off(table)
        for row_id, prompt in zip(user.column("id").to_pylist(), what.prompts, strict=True):
            text = by_id.pop(row_id)
            assert prompt.is_requested == bool(text)
            if text:
                assert text == bytes(prompt.token_ids.tolist()).decode()
    assert {} == by_id


def test_rows_of_a_document_are_neighbours_with_one_group(small):
    seen = []
    for table in units_of(small[0])[0]:
        user, what = take_off(table)
        pairs = zip(user.column("text").to_pylist(), what.group_ids, what.prefix_lens, strict=True)
        seen += [(text.split()[0], group, length) for text, group, length in pairs if text]
    runs = [pair for i, pair in enumerate(seen) if i == 0 or seen[i - 1] != pair]
    assert len({document for document, _, _ in runs}) == len(runs)
    assert all(length % BLOCK == 0 and length > 0 for _, _, length in runs)


def test_rows_that_no_engine_sees_come_last_and_are_counted_by_reason(small):
    _, rows, planned = small
    last = [rows.prompts[row].is_requested for row in planned.whole.order.tolist()]
    assert last == sorted(last, reverse=True)
    assert {"InvalidPrompt": 2} == dict(planned.skipped)


def test_copies_save_all_of_their_tokens(tmp_path, model):
    job = run_spec(tmp_path, model)
    apart = run_spec(tmp_path / "apart", model, dedup=False)
    once, twice = (plan_gathered(gather(j), j.config, j.plan).arrangement for j in (job, apart))
    copy = document_rows().column("text").to_pylist()[2]
    assert once.stats.num_duplicates == 1
    assert 0 < twice.computed_tokens - once.computed_tokens <= len(copy)


def test_rows_whose_results_differ_by_chance_are_no_copies(tmp_path, model):
    job = run_spec(tmp_path, model, sampling={"temperature": 1.0, "max_tokens": 4})
    assert 0 == gather_stats(job).num_duplicates


def test_rows_with_other_options_are_no_copies(tmp_path, model):
    table = pa.table({"id": ["a", "b"], "text": ["same text"] * 2, "most": [3, 4]})
    job = run_spec(tmp_path, model, table, overrides={"max_tokens": "most"})
    assert 0 == gather_stats(job).num_duplicates


def gather_stats(job):
    return plan_gathered(gather(job), job.config, job.plan).arrangement.stats


def test_lengths_of_a_column_reach_the_plan(tmp_path, model):
    plan = PlanConfig(expected_tokens_column="long")
    lengths = [2, None, 1, 0, 99]
    table = pa.table({"id": list("abcde"), "text": ["x" * 9] * 5, "long": lengths})
    job = run_spec(tmp_path, model, table, plan=plan)
    rows = gather(job)
    assert [2.0, 4.0, 1.0, 1.0, 4.0] == rows.plan_index.expected_tokens.tolist()
    (unit,), _ = units_of(job)
    assert {2, 4, 1} == set(take_off(unit)[1].expected_lens)


@pytest.mark.parametrize(
    ("values", "problem"),
    [([1, -2, 3], "is -2 in row 'b'"), (["1", "x", "3"], "plan.expected_tokens_column 'long'")],
)
def test_bad_lengths_are_told_with_column_and_row(tmp_path, model, values, problem):
    plan = PlanConfig(expected_tokens_column="long")
    table = pa.table({"id": ["a", "b", "c"], "text": ["x" * 9] * 3, "long": values})
    with pytest.raises(ConfigError, match=problem):
        gather(run_spec(tmp_path, model, table, plan=plan))


def test_a_missing_column_of_lengths_is_told(tmp_path, model):
    plan = PlanConfig(expected_tokens_column="nope")
    with pytest.raises(ConfigError, match="'nope' is not in the source"):
        gather(run_spec(tmp_path, model, plan=plan))


def test_names_of_plan_columns_are_refused_in_the_source():
    with pytest.raises(ConfigError, match="__rb_plan_group"):
        check_names(pa.schema([("__rb_plan_group", pa.int64())]))


def test_units_of_large_rows_are_small(tmp_path, model):
    source = run_spec(tmp_path, model).source
    large = tuple(replace(part, num_bytes=part.num_rows * (30 << 20)) for part in source.slices)
    fitted = fit_units(PlanConfig(), replace(source, slices=large))
    assert (2, 2) == (fitted.unit_rows, fitted.max_unit_rows)


class Tasks:
    """Runs the tasks of a large plan one after another, over pieces of one file each."""

    def __init__(self, job, num_parts, *, probed=None):
        self.job, plan = job, job.plan
        source, first_row = job.source, 0
        self.pieces, tables = [], []
        describer = RowDescriber(job.config, plan)
        kept, tasks.describer_of = tasks.describer_of, lambda _: describer
        try:
            for at in range(len(source.slices)):
                slices = range(at, at + 1)
                summary, table, _ = tasks.describe(b"", source, slices, first_row, 2, None, False)
                self.pieces.append(summary)
                tables.append(table)
                first_row += summary.num_rows
        finally:
            tasks.describer_of = kept
        self.piece_rows = np.cumsum([0, *(p.num_rows for p in self.pieces)])
        rule = choose_parts(BlockKeys.concat([p.sample for p in self.pieces]), num_parts)
        split = [tasks.split(table, rule) for table in tables]
        split = [[tables] if num_parts == 1 else tables for tables in split]
        arrange = ArrangeJob(plan=plan, dedup=True, num_rows=first_row, num_parts=num_parts)
        arranged = [
            tasks.arrange(arrange, probed, *(tables[part] for tables in split))
            for part in range(num_parts)
        ]
        self.parts, self.arranged = zip(*arranged, strict=True)

    def shards(self, num_stretches, probe=()):
        plan, probe = self.job.plan, np.array(probe, np.int64)
        values = np.concatenate([part.values for part in self.parts])
        weights = np.concatenate([part.weights for part in self.parts])
        cuts = cut_values(values, weights, num_stretches)
        sizes = [tasks.unit_sizes(part, cuts, plan) for part in self.arranged]
        unit, first_units = -(-len(probe) // plan.unit_rows), [[] for _ in sizes]
        for stretch in range(len(cuts) + 1):
            for part, sizes_of_part in enumerate(sizes):
                first_units[part].append(unit)
                unit += len(sizes_of_part[stretch])
        group, ranked = 0, []
        for part, first, summary in zip(self.arranged, first_units, self.parts, strict=True):
            tables = tasks.rank(part, cuts, plan, first, group, self.piece_rows)
            ranked.append([tables] if len(self.pieces) == 1 else tables)
            group += summary.profile.num_groups
        shards, skipped = [], 0
        for i, piece in enumerate(self.pieces):
            where = (int(self.piece_rows[i]), piece.num_rows, skipped, unit, plan.unit_rows, probe)
            shards.append(tasks.shard(*where, *(tables[i] for tables in ranked))[1])
            skipped += piece.skipped.total()
        return pa.concat_tables(shards)


def order_of(shard):
    unit, pos = (shard.column(name).to_numpy() for name in ("unit", "pos"))
    return np.lexsort((pos, unit))


def test_one_part_is_planned_as_the_driver_plans_it(small):
    job, _, planned = small
    tasks = Tasks(job, 1)
    shard = tasks.shards(1)
    expected = shard_of(planned.whole, np.full(planned.num_rows, np.nan))
    assert len(tasks.pieces) > 2
    assert expected.select(["unit", "pos", "prefix_len"]).equals(
        shard.select(["unit", "pos", "prefix_len"]).combine_chunks()
    )
    assert digest_of(expected) == digest_of(shard.combine_chunks())


@pytest.mark.parametrize(("num_parts", "num_stretches"), [(2, 1), (3, 2), (2, 4)])
def test_parts_hold_every_row_once_in_units_of_consecutive_ranks(small, num_parts, num_stretches):
    job, rows, _ = small
    shard = Tasks(job, num_parts).shards(num_stretches)
    assert rows.table.num_rows == shard.num_rows
    unit, pos = (shard.column(name).to_numpy() for name in ("unit", "pos"))
    order = order_of(shard)
    expected = [p for size in np.bincount(unit) for p in range(size)]
    assert expected == pos[order].tolist()


def test_parts_save_what_the_whole_saves_and_keep_groups_together(tmp_path, model):
    job = run_spec(tmp_path, model, document_rows(60))
    found = plan_gathered(gather(job), job.config, job.plan).arrangement
    tasks = Tasks(job, 3)
    # documents share nothing with each other, so that cutting between them costs nothing
    assert found.computed_tokens == sum(part.profile.computed_tokens for part in tasks.parts)
    shard = tasks.shards(2)
    groups = shard.column("group_id").to_pylist()
    ranked = [groups[row] for row in order_of(shard) if groups[row] is not None]
    runs = [g for i, g in enumerate(ranked) if i == 0 or ranked[i - 1] != g]
    assert len(runs) == len(set(runs))


@pytest.fixture
def with_adapters(tmp_path, model):
    """A job whose rows name three adapters in turn, and their names."""
    for name in "abc":
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"r": 8}')
    table = document_rows(30)
    names = [None if i % 4 == 3 else "abc"[i % 4] for i in range(table.num_rows)]
    table = table.append_column("adapter", pa.array(names, pa.string()))
    options = {"lora_column": "adapter", "lora_path": str(tmp_path / "adapters")}
    return run_spec(tmp_path, model, table, **options), np.array(names)


def test_one_part_of_rows_with_adapters_is_planned_as_the_driver_plans_it(with_adapters):
    job, _ = with_adapters
    planned = plan_gathered(gather(job), job.config, job.plan)
    expected = shard_of(planned.whole, np.full(planned.num_rows, np.nan))
    assert digest_of(expected) == digest_of(Tasks(job, 1).shards(1).combine_chunks())


@pytest.mark.parametrize(("num_parts", "num_stretches"), [(1, 1), (2, 1), (2, 3)])
def test_rows_of_an_adapter_follow_each_other_in_stretches(with_adapters, num_parts, num_stretches):
    job, names = with_adapters
    shard = Tasks(job, num_parts).shards(num_stretches)
    order = order_of(shard)
    assert sorted(order) == list(range(len(names)))
    in_order = names[order[: -sum(p.skipped.total() for p in Tasks(job, 1).pieces)]]
    changes = sum(one != other for one, other in pairwise(in_order))
    assert changes < 4 * num_parts * num_stretches


def test_probed_rows_come_first_and_their_lengths_order_the_others(tmp_path, model):
    plan = PlanConfig(unit_rows=8, max_unit_rows=16, lengths="probe", probe_fraction=0.2)
    job = run_spec(tmp_path, model, plan=plan)
    chosen = np.sort(np.concatenate([part.probe for part in Tasks(job, 2).parts]))
    assert len(chosen) >= 3
    probed = ProbedRows(row=chosen, lengths=np.linspace(1, 4, len(chosen)))
    shard = Tasks(job, 2, probed=probed).shards(1, probe=chosen)
    order = order_of(shard)
    assert chosen.tolist() == order[: len(chosen)].tolist()
    assert sorted(order.tolist()) == list(range(shard.num_rows))


def test_chosen_rows_are_read_by_their_numbers(tmp_path, model):
    job = run_spec(tmp_path, model)
    wanted = np.array([0, 3, 8, 15])
    tables, first_row = [], 0
    for at, part in enumerate(job.source.slices):
        slices = range(at, at + 1)
        tables.append(tasks.chosen_rows(job.source, slices, first_row, wanted, None))
        first_row += part.num_rows
    assert [f"r{i}" for i in wanted] == pa.concat_tables(tables).column("id").to_pylist()


def test_a_probe_takes_a_share_of_each_band_of_longest_outputs():
    max_tokens = np.array([4] * 50 + [4000] * 50)
    probe = probe_rows(np.full(100, -1), max_tokens, PlanConfig(probe_fraction=0.1))
    assert [5, 5] == np.bincount(probe // 50).tolist()


def test_estimates_stay_within_what_rows_may_generate_and_skip_errors():
    probe, lengths = np.array([0, 1]), np.array([30.0, np.nan])
    found = estimate(probe, lengths, np.full(3, -1), np.array([20, 20, 20]))
    assert [20.0, 20.0, 20.0] == found.tolist()
    assert [5.0] == estimate(
        np.array([0]), np.array([np.nan]), np.array([-1]), np.array([5])
    ).tolist()


def stored(name, shards, num_rows):
    return StoredPlan(
        hash=name,
        num_rows=num_rows,
        num_units=1,
        num_groups=0,
        is_reordered=True,
        logical_tokens=1,
        computed_tokens=1,
        block_size=BLOCK,
        options={},
        files=(("a.parquet", num_rows, "digest"),),
        shards=shards,
        fingerprint={},
    )


def test_a_stored_plan_is_read_back_across_shards(tmp_path, small):
    _, _, planned = small
    nothing = np.full(planned.num_rows, np.nan)
    shard, sink = shard_of(planned.whole, nothing), str(tmp_path / "out")
    half = shard.num_rows // 2
    names = (
        write_shard(sink, "h", 0, shard.slice(0, half)),
        write_shard(sink, "h", half, shard.slice(half)),
    )
    units = stretches("h", np.array([1]))
    stored_plan = stored("h", tuple(zip(names, (0, half), strict=True)), shard.num_rows)
    stored_plan = replace(stored_plan, num_units=planned.whole.num_units)
    plan = write_plan(sink, stored_plan, units)
    assert shard.equals(read_shards(sink, plan, 0, shard.num_rows).combine_chunks())
    part = read_shards(sink, plan, half - 2, half + 3)
    assert shard.slice(half - 2, 5).equals(part.combine_chunks())


@pytest.mark.parametrize("column", range(len(SHARD_SCHEMA)), ids=SHARD_SCHEMA.names)
def test_a_digest_is_of_every_value_of_a_shard(column):
    shard = rows_in_stretches(np.array([2, 1]), np.arange(3))
    field = SHARD_SCHEMA[column]
    digests = {
        digest_of(shard.set_column(column, field, pa.array([1, 0, last], field.type)))
        for last in (0, 1, 2)
    }
    assert len(digests) == 3
    assert digest_of(shard) == digest_of(rows_in_stretches(np.array([2, 1]), np.arange(3)))


WRONG = {
    "num_rows": "x",
    "num_units": True,
    "computed_tokens": -1,
    "fingerprint": 17,
    "options": [],
    "files": [["a.parquet", 3]],
    "partition_by": "lang",
    "version": 1,
}


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_a_plan_with_a_value_of_another_type_is_refused_by_field(tmp_path, name, value):
    sink = str(tmp_path)
    write_plan(sink, stored("h", (), 3), stretches("h", np.array([3])))
    path = tmp_path / "_raybatch" / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(ConfigError, match=r"restore it from a copy") as caught:
        read_plan(sink)
    assert name in str(caught.value) or name == "files"


@pytest.mark.parametrize("stored_plan", ["", "{", "[]", "{}"])
def test_a_file_that_is_no_plan_is_refused_with_the_way_out(tmp_path, stored_plan):
    (tmp_path / "_raybatch").mkdir()
    (tmp_path / "_raybatch" / "plan.json").write_text(stored_plan)
    with pytest.raises(ConfigError, match=r"plan\.json is not a plan .* restore it from a copy"):
        read_plan(str(tmp_path))


BESIDE = {"units": (0, [0, 9, 1]), "no unit": (0, [0, -1, 1]), "no place": (1, [0, -1, 0])}


@pytest.mark.parametrize("damage", ["gone", "cut", "rows", *BESIDE])
def test_rows_of_a_plan_that_are_damaged_are_named_with_the_way_out(tmp_path, damage):
    sink, units = str(tmp_path), stretches("h", np.array([2, 1]))
    shard = rows_in_stretches(units.unit_rows, np.arange(3))
    path = tmp_path / "_raybatch/plan/h" / write_shard(sink, "h", 0, shard)
    plan = replace(stored("h", ((path.name, 0),), 3), num_units=2)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        path.unlink()
    if damage in BESIDE:
        column, values = BESIDE[damage]
        wrong = pa.array(values, SHARD_SCHEMA[column].type)
        write_shard(sink, "h", 0, shard.set_column(column, SHARD_SCHEMA[column], wrong))
    if damage == "rows":
        write_shard(sink, "h", 0, shard.slice(1))
    with pytest.raises(ConfigError, match=rf"{path.name} cannot be read, .* from a copy"):
        read_shards(sink, plan, 0, 3)


def test_units_that_are_not_those_of_the_plan_are_refused(tmp_path):
    plan = write_plan(str(tmp_path), stored("h", (), 3), stretches("h", np.array([3])))
    with pytest.raises(ConfigError, match=r"units\.arrow cannot be read.* 1 units and 3 rows"):
        read_units(str(tmp_path), replace(plan, num_rows=4))


def test_the_first_plan_holds_for_whoever_comes_later(tmp_path):
    sink = str(tmp_path / "out")
    for name in ("one", "two"):
        found = write_plan(sink, stored(name, (), 3), stretches(name, np.array([3])))
        assert "one" == found.hash
    assert "one" == read_plan(sink).hash


def test_places_in_stretches_of_the_input_need_no_shard(tmp_path):
    sink = str(tmp_path / "out")
    stored_plan = replace(stored("h", (), 7), num_units=3)
    plan = write_plan(sink, stored_plan, stretches("h", np.array([3, 1, 3])))
    table = read_shards(sink, plan, 2, 6)
    assert [0, 1, 2, 2] == table.column("unit").to_pylist()
    assert [2, 0, 0, 1] == table.column("pos").to_pylist()


def test_sums_of_pieces_add_up_to_those_of_the_units():
    unit = np.array([0, 1, 1, 0, 2], np.int32)
    shard = pa.table({"unit": unit})
    parts = [tasks.sums_of(shard.slice(0, 2), 0, 3), tasks.sums_of(shard.slice(2), 2, 3)]
    assert row_sums(unit, np.arange(5), 3).tolist() == tasks.added(*parts).tolist()


RANDOM = {"max_tokens": 4, "temperature": 1.0}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"sampling": {"max_tokens": 5}}),
        ({}, {"prompt": "{text}!"}),
        ({}, {"sampling": RANDOM}),
        ({"sampling": RANDOM}, {"sampling": RANDOM, "seed": 8}),
    ],
)
def test_what_decides_results_is_in_the_hash_of_the_plan(tmp_path, model, one, other):
    jobs = [
        run_spec(tmp_path / name, model, **options)
        for name, options in (("a", one), ("b", one), ("c", other))
    ]
    for job in jobs:
        units_of(job)
    first, again, changed = (read_plan(job.sink).hash for job in jobs)
    assert first == again
    assert first != changed


def test_small_and_large_plans_expect_the_same_of_each_row(tmp_path, model):
    plan = PlanConfig(expected_tokens_column="long")
    table = document_rows()
    lengths = [None if i % 3 else 10.0**i for i in range(table.num_rows)]
    job = run_spec(tmp_path, model, table.append_column("long", pa.array(lengths)), plan=plan)
    rows = gather(job)
    expected = np.full(rows.plan_index.num_rows, np.nan)
    expected[rows.plan_index.requested] = rows.plan_index.expected_tokens
    planned = plan_gathered(rows, job.config, plan)
    small_shard, large_shard = shard_of(planned.whole, expected), Tasks(job, 2).shards(1)
    assert small_shard.column("expected_len").equals(large_shard.column("expected_len"))


def test_a_probe_without_any_row_to_ask_is_no_probe(tmp_path, model):
    table = pa.table({"id": ["a", "b"], "text": pa.array([None, ""], pa.string())})
    plan = PlanConfig(lengths="probe")
    tables, planned = units_of(run_spec(tmp_path, model, table, plan=plan))
    assert (2, 0) == (sum(t.num_rows for t in tables), len(planned.requested))


def test_a_folder_without_a_plan_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"plan\.json"):
        read_plan(str(tmp_path))


def test_ids_of_the_describer_are_those_of_the_column(tmp_path, model):
    job = run_spec(tmp_path, model)
    table = document_rows()
    prepared, _ = RowDescriber(job.config, job.plan)(table)
    assert column_row_ids(table.column("id"))[0] == prepared.row_ids


def test_a_prepared_batch_asks_identical_greedy_rows_once(model):
    stage = fake_stage(model, prompt="{text}", sampling=Sampling(max_tokens=4))
    describer = RowDescriber(stage.config, PLAN)
    prepared, _ = describer(pa.table({"text": ["same", "same", "other"]}))
    # the describer itself keeps copies apart: the plan has to see them
    assert {} == prepared.copies
