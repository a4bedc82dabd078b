import pyarrow as pa

from tests.stages.support import FullPool, answer, fake_stage, local


def counted(stage, table) -> tuple[int, dict[str, int]]:
    stage = local(stage)
    answer(stage, table)
    return stage.pool.rows_outside, dict(stage.pool.errors_outside)


def test_rows_that_never_reach_the_pool_are_counted_with_their_errors(model):
    stage = fake_stage(model, prompt="{text}", engine={"max_model_len": 9})
    table = pa.table({"text": ["good", None, "x" * 50]})
    assert counted(stage, table) == (2, {"InvalidPrompt": 1, "PromptTooLong": 1})


def test_rows_that_are_dropped_are_counted_as_done(model):
    stage = fake_stage(model, prompt="{text}", on_too_long="drop", engine={"max_model_len": 9})
    assert counted(stage, pa.table({"text": ["good", "x" * 50]})) == (1, {})


def test_errors_that_the_pool_counts_are_not_counted_again(model):
    stage = fake_stage(model, prompt="{text}", fake={"error_on": ord("E")})
    assert counted(stage, pa.table({"text": ["good", "E"]})) == (0, {})


def test_errors_found_after_the_pool_are_counted(model):
    spec = fake_stage(model).pool.spec
    stage = local(fake_stage(model, prompt="{text}"))
    stage.pool = FullPool(spec)
    answer(stage, pa.table({"text": ["a"]}))
    assert (stage.pool.rows_outside, stage.pool.errors_outside) == (0, {"CapacityError": 1})


def test_copies_are_counted_by_the_pool_with_their_rows(model):
    stage = local(fake_stage(model, prompt="{text}", fake={"error_on": ord("E")}))
    answer(stage, pa.table({"text": ["good", "E", "good", "bad", "E", "good"]}))
    assert stage.pool.copies == [2, 1, 0]
    assert (stage.pool.rows_outside, stage.pool.errors_outside) == (0, {})
