"""The execution mode that engines would choose for a plan, if it is known before one runs."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from raybatch.config import EngineConfig
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.explanation import explain
from raybatch.job.job import Job
from raybatch.policy.choose_engine import choose_engine
from raybatch.policy.cost.work import work_totals
from raybatch.stages.feeder import LLMStage
from tests.engine.tiny_models import build
from tests.stages.support import make_tokenizer, write_parquet

KV = {"device": "cpu", "kv_cache_bytes": 1 << 20}
HOST = {**KV, "host_kv_bytes": 1 << 26}
# two blocks of 64 tokens in common
TEXTS = ["x" * 130 + str(i) for i in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tokenizer(tmp_path_factory.mktemp("m") / "moe", has_chat_template=False)
    build("qwen3-moe", vocab_size=512).save_pretrained(folder)
    return folder


@pytest.fixture
def engine_line(model, tmp_path, monkeypatch):
    """Returns the line for some options of the engine."""
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"text": TEXTS}))

    def engine_line(engine, **options):
        options |= {"prompt": "{text}", "sampling": {"max_tokens": 30}, "engine": engine}
        options |= {"pool": {"replicas": 1}}
        job = Job(tmp_path / "in", tmp_path / "out", LLMStage(str(model), **options))
        found = job.explain(measure=False)
        lines = [x for x in str(found).splitlines() if x.startswith("engine ")]
        assert [found.engine] * bool(found.engine) == [x.split(maxsplit=1)[1] for x in lines]
        return found.engine

    return engine_line


def test_without_host_memory_nothing_is_chosen_and_torch_is_not_asked(engine_line, monkeypatch):
    monkeypatch.setattr(explain, "find_spec", lambda _: pytest.fail("torch was asked for"))
    assert engine_line(KV).startswith("KV on device: engine.host_kv_bytes is 0")


def test_an_engine_that_has_measured_nothing_is_said_to_choose_later(engine_line):
    assert "is chosen by the first engine that runs, which measures its layers" == engine_line(HOST)


def test_measured_layers_tell_what_is_chosen_for_the_rows_of_the_plan(
    engine_line, model, monkeypatch
):
    requested = []
    monkeypatch.setattr(
        explain, "choose_engine", lambda inputs: requested.append(inputs) or choose_engine(inputs)
    )
    prepared = PreparedModel.load(str(model), EngineConfig(**HOST))
    assert prepared.profile is not None
    line = engine_line(HOST)
    assert line.startswith("KV ")
    assert "output tokens/s forecast, " in line
    rows = requested[0].rows
    # weights are counted without those of norms
    assert requested[0].placement.is_resident == (True, True, True)
    assert replace(prepared.inputs(rows), placement=requested[0].placement) == requested[0]
    # what 40 rows have in common is computed once, and read by all
    assert (40, 30) == (rows.num_rows, rows.shape.output_tokens)
    assert rows.shape.prompt_tokens < 10 < 120 < rows.shared_tokens < 130
    # with all that a row may generate
    assert rows.longest_tokens == 132 + 30
    # rows that no memory holds end where it does
    small = {**HOST, "kv_cache_bytes": 1 << 16, "block_size_tokens": 16}
    assert "is chosen by" in engine_line(small)
    assert PreparedModel.load(str(model), EngineConfig(**small)).profile is not None
    assert engine_line(small).startswith("KV ")
    monkeypatch.setattr(explain, "find_spec", lambda _: None)
    assert "is chosen by" in engine_line(HOST)


def test_engines_of_others_choose_nothing(engine_line):
    assert engine_line(KV, backend={"kind": "fake"}) == ""


def test_rows_are_those_of_one_engine_with_what_they_read_and_do_not_compute():
    prompts, outputs = np.full(90, 50), np.tile([4.0, 8.0, 12.0], 30)
    shared = work_totals(
        prompts,
        outputs,
        cached_tokens=np.where(np.arange(90) % 30, 20, 0),
        shared_tokens=np.full(90, 20),
        num_members=np.full(90, 30),
    )
    found = explain.rows_of(shared, 4, 50.0)
    assert (23, 31, 8) == (found.num_rows, found.shape.prompt_tokens, found.shape.output_tokens)
    assert (4.0, 12.0) == (found.output_lengths[0], found.output_lengths[-1])
    assert found.shared_tokens == pytest.approx(50 - 30.67, abs=0.5)
    cached = work_totals(prompts, np.full(90, 8.0)).with_cache(90 * 10.0)
    found = explain.rows_of(cached, 1, 50.0)
    assert (10, ()) == (found.shape.prompt_tokens, found.output_lengths)
    assert found.shared_tokens == pytest.approx(40.0)
    once = work_totals(prompts, np.ones(90))
    assert (0.0, 50) == (explain.rows_of(once, 1, 50.0).shared_tokens, 50)
