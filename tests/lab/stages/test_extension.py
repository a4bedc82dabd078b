"""A pool with stages: rows move on as they grow, with equal tokens and one result each."""

import asyncio
import json
import logging
import random
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.actors.wire.records import MoveStep, PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.policy.pool.snapshot import PoolSnapshot
from raybatch.records.types import Sampling
from raybatch_lab.stages.decision import Decision
from raybatch_lab.stages.extension import Stages
from raybatch_lab.stages.plan import Stage, StagePlan
from tests.actors.moving_pool import (
    BLOCK,
    MovingPool,
    MovingReplica,
    PacedBackend,
    pool_of_processes,
)
from tests.actors.test_moves import LONG_PROMPTS, Killer, check_holders, expected, run, run_engine
from tests.engine.real_engines import Engines, requests_of
from tests.engine.sequences.test_forks import make
from tests.engine.tiny_models import build
from tests.lab.stages.pools import QUALITY
from tests.lab.stages.test_moving import replica
from tests.stages.support import write_parquet
from tests.tiers import singles, some

PROMPTS = [np.arange(i, 9 + 2 * i, dtype=np.int32) for i in range(16)]
SAMPLING = Sampling(max_tokens=60)
BOUND = 40
TWO = (
    Stage(above=0, up_to=BOUND, num_replicas=1),
    Stage(above=BOUND, up_to=1 << 20, num_replicas=1),
)
STEPS = [step for step in get_args(MoveStep) if step != "stay"]


class NarrowReplica(MovingReplica):
    """An engine that runs few rows at once, so that others wait."""

    def _build(self):
        engine, _ = make(block_size=BLOCK, max_num_seqs=4, num_blocks=900)
        self.engine, self.backend = engine, PacedBackend(engine)
        return self.backend


@pytest.fixture(autouse=True)
def narrow_and_quick(monkeypatch, lab, own_cache):
    """Rows of these engines live for less than a second."""
    monkeypatch.setattr("tests.actors.moving_pool.MovingReplica", NarrowReplica)
    monkeypatch.setattr("raybatch.actors.replica.replica._PROGRESS_EVERY_S", 0.01)
    monkeypatch.setattr("raybatch.actors.coordinator.coordinator._TICK_S", 0.02)


@pytest.fixture
def outgrown(monkeypatch):
    """Rows begin in the first stage, and outgrow it on their way."""
    decision = Decision(plan=StagePlan(stages=TWO, seconds=1.0), text="two stages of a test")
    monkeypatch.setattr("raybatch_lab.stages.extension.decide_number", lambda *_: decision)
    # a pool that rebalances moves rows as well
    monkeypatch.setattr("raybatch.policy.pool.plan.spread_rows", lambda pool: ((), 0.0))


def stages_of(pool):
    (found,) = [each for each in pool.rebalancer.extensions if isinstance(each, Stages)]
    return found


async def checked(pool):
    while True:
        check_holders(pool)
        await asyncio.sleep(0.005)


@pytest.mark.usefixtures("outgrown")
def test_rows_that_outgrow_their_stage_move_on_and_keep_their_tokens():
    pool = MovingPool(stages=2)
    tokens, attempts = run(pool, checked, prompts=PROMPTS, sampling=SAMPLING)
    assert expected(PROMPTS, SAMPLING) == tokens
    assert {1} == set(attempts)
    assert pool.counters.num_moved > 0
    assert pool.counters.num_bytes > 0


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("seed", some(range(2)))
def test_stages_beside_random_moves_and_deaths_change_no_token(seed, num_replicas):
    pool = MovingPool(num_replicas=num_replicas, stages=2)

    async def disturbed(pool):
        generator, num_deaths = random.Random(seed), 0
        while True:
            await asyncio.sleep(0.01)
            check_holders(pool)
            pool.move_at_random(generator)
            stages_of(pool).ranges.bounds = np.array([float(generator.randrange(20, 80))])
            if num_deaths < 2 and generator.random() < 0.05:
                num_deaths += 1
                generator.choice(list(pool.runtime.sides.values())).dead.set()

    tokens, _ = run(pool, disturbed, prompts=PROMPTS, sampling=SAMPLING)
    assert expected(PROMPTS, SAMPLING) == tokens


class StageKiller(Killer):
    """Ends one side of a move that the extension plans, at one of its steps.

    Engines step slowly until then, so that no row ends before a busy host has moved it.
    """

    slow_s, quick_s = 0.02, PacedBackend.pace_s

    def __call__(self, side, step, when):
        if not self.replica_ids:
            # a move begins with a look at its source
            other = next(r for r in self.sides if r != side.replica_id)
            self.reported(side.replica_id, other)
        super().__call__(side, step, when)

    def end(self, side):
        super().end(side)
        PacedBackend.pace_s = self.quick_s


@pytest.mark.usefixtures("outgrown")
@pytest.mark.parametrize(
    ("step", "when", "victim"), singles(STEPS, ["before", "after"], ["source", "target"])
)
def test_a_death_at_any_step_of_a_move_to_the_next_stage_loses_nothing(
    step, when, victim, monkeypatch
):
    monkeypatch.setattr(PacedBackend, "pace_s", StageKiller.slow_s)
    killer = StageKiller(step, when, victim)
    pool = MovingPool(script=killer, stages=2)
    killer.sides = pool.runtime.sides
    tokens, _ = run(pool, checked, prompts=PROMPTS, sampling=SAMPLING)
    assert expected(PROMPTS, SAMPLING) == tokens
    assert killer.is_done


def test_bounds_follow_the_rows_that_run_and_stay_while_few_do_or_no_step_was_seen():
    stages = stages_of(MovingPool(stages=2))
    stages.ranges.begin(StagePlan(stages=TWO, seconds=1.0))
    stages.ranges.stage_of = {1: 0, 2: 1}
    many = PoolSnapshot(replicas=(replica(1, range(20, 40)), replica(2, range(200, 220))))
    few = PoolSnapshot(replicas=(replica(1, [20, 21]), replica(2, [200, 220])))
    stages._refine(many)
    assert stages.ranges.bounds.tolist() == [BOUND]
    stages.steps.quality = QUALITY
    stages._refine(few)
    assert stages.ranges.bounds.tolist() == [BOUND]
    before = BOUND
    for _ in range(4):
        stages._refine(many)
        assert stages.ranges.bounds[0] > before
        before = stages.ranges.bounds[0]


def test_bounds_stay_where_a_stage_has_no_replica():
    stages = stages_of(MovingPool(stages=2))
    stages.ranges.begin(StagePlan(stages=TWO, seconds=1.0))
    stages.ranges.stage_of = {1: 0}
    stages.steps.quality = QUALITY
    stages._refine(PoolSnapshot(replicas=(replica(1, range(20, 40)),)))
    assert stages.ranges.bounds.tolist() == [BOUND]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    build("qwen3").save_pretrained(path)
    return path


@pytest.mark.usefixtures("warm_processes")
def test_engines_in_processes_give_the_tokens_of_one_engine(folder, caplog):
    engine = Engines(folder)
    made = engine.make(engine.config(block_size_tokens=8))
    made.add(requests_of(LONG_PROMPTS, max_tokens=120))
    alone = [tokens for _, tokens in sorted(run_engine(made).items())]
    caplog.set_level(logging.INFO, "raybatch_lab")
    pool = pool_of_processes(folder, 2, stages=2)
    prompts = [np.array(prompt, np.int32) for prompt in LONG_PROMPTS]
    tokens, attempts = run(pool, checked, prompts=prompts, sampling=Sampling(max_tokens=120))
    assert alone == tokens
    assert {1} == set(attempts)
    assert stages_of(pool).ranges.num_stages == 2
    assert "pool.stages=2: 2 stages, as asked for: up to " in caplog.text


def test_more_stages_than_engines_are_refused_as_the_pool_is_made():
    with pytest.raises(ConfigError, match=r"pool\.stages=3 .* the pool has 2"):
        MovingPool(num_replicas=2, stages=3)


def write_job(folder, model, stages):
    texts = [f"{'long ' * (i % 7)}row {i}" for i in range(40)]
    write_parquet(folder / "in" / "a.parquet", pa.table({"text": texts}))
    job = {
        "source": str(folder / "in"),
        "sink": str(folder / "out"),
        "executor": "local",
        "stage": {
            "model": str(model),
            "prompt": "{text}",
            "sampling": {"max_tokens": 24},
            "backend": {"kind": "fake", "options": {"step_s": 0.002}},
            "pool": {"replicas": 2, "stages": stages},
        },
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path, texts


def rows_of(path):
    """Run a job from its file; return the answer to each text."""
    Job.from_yaml(path).run(progress=lambda *_: None)
    found = pq.read_table(path.parent / "out").to_pylist()
    assert {""} == {row["__inference_error__"] for row in found}
    return sorted((row["text"], str(row)) for row in found)


@pytest.mark.usefixtures("locally")
def test_a_job_file_with_stages_has_each_row_once(tmp_path, model, caplog):
    caplog.set_level(logging.INFO, "raybatch_lab")
    (tmp_path / "with").mkdir()
    (tmp_path / "off").mkdir()
    path, texts = write_job(tmp_path / "with", model, 2)
    without, _ = write_job(tmp_path / "off", model, "off")
    rows = rows_of(path)
    assert sorted(texts) == [text for text, _ in rows]
    assert "pool.stages=2: 2 stages, as asked for" in caplog.text
    assert rows == rows_of(without)


def auto_text(caplog, spec):
    """Return the one line of a pool that has stages where they pay."""
    caplog.set_level(logging.INFO, "raybatch_lab")
    pool = MovingPool(spec=spec)
    run(pool, checked, prompts=PROMPTS, sampling=SAMPLING)
    assert stages_of(pool).ranges.num_stages == 0
    message = [r.getMessage() for r in caplog.records if r.name.startswith("raybatch_lab")]
    (text,) = message
    return text


def spec_of(kind):
    return PoolSpec(
        model="none",
        backend=BackendConfig(kind=kind),
        engine=EngineConfig(device="cpu", max_batched_tokens=64),
        pool=PoolConfig(replicas=2, stages="auto"),
    )


def test_on_a_cpu_the_pool_says_no_in_one_line_with_both_numbers(caplog):
    text = auto_text(caplog, spec_of("native"))
    assert text.startswith("pool.stages='auto': no stages: attention over lengths that vary by 0.")
    assert "costs 1.0" in text
    assert "(measured for native engines on CPUs), and the forecast saves " in text


def test_what_was_not_measured_is_said_with_what_measures_it(caplog):
    text = auto_text(caplog, spec_of("fake"))
    assert "was not measured here; raybatch bench calibrate" in text
