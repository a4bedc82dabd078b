"""Runs of real engines in turns, beside the steps that are simulated for them."""

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count, groupby

import numpy as np
import pytest

from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError, MeasureError
from raybatch_lab.calibrated_engines import engines_of
from raybatch_lab.measured_runs import Run, run_round
from raybatch_lab.simulator.rows import SimulatedRows
from tests.engine.tiny_models import build
from tests.lab.simulator.pools import costs

NATIVE = BackendConfig(kind="native")
ROWS = SimulatedRows.of(np.full(6, 16), np.arange(2, 8)).with_oracle()
ROWS = replace(ROWS, max_tokens=ROWS.output)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build("qwen3").save_pretrained(folder)
    engine = EngineConfig(
        device="cpu", block_size_tokens=8, kv_cache_bytes=1 << 24, speculative_tokens=None
    )
    return engines_of(str(folder), NATIVE, engine)


@pytest.fixture
def start(engines):
    """Makes a run of the rows, and an engine for it."""
    with ExitStack() as stack:

        def make(rows=ROWS, *, kv_tokens=128):
            backend = stack.enter_context(
                closing(engines.start(kv_tokens, max_num_seqs=4, max_len=32))
            )
            return Run.of("some", "as they are", rows, engines.spec(backend, costs())), backend

        yield make


class Polled:
    """Notes the polls of a backend."""

    def __init__(self, backend, name, seen):
        self._backend, self._name, self._seen = backend, name, seen

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def poll(self):
        self._seen.append(self._name)
        return self._backend.poll()


def ticks(step_s):
    numbers = count()
    return lambda: step_s * next(numbers)


def test_each_step_has_the_median_of_its_rounds(start):
    run, backend = start()
    for number, step_s in enumerate((8.0, 1.0, 4.0, 2.0)):
        run_round([(run, backend)], ticks(step_s), number, is_kept=number > 0)
    assert [len(seconds) for seconds in run.seconds] == [len(run.counts)] * 3
    assert {step.seconds for step in run.steps()} == {2.0}
    assert [step.tokens for step in run.steps()] == [step.tokens for step in run.counts]


def test_rounds_have_prompts_of_their_own(start):
    run, backend = start()
    for number in range(3):
        run_round([(run, backend)], ticks(1.0), number, is_kept=True)
    assert backend.stats().cached_tokens == 0


def test_runs_go_on_in_turns(start):
    seen, pairs = [], [start(), start()]
    pairs = [(run, Polled(backend, i, seen)) for i, (run, backend) in enumerate(pairs)]
    run_round(pairs, ticks(1.0), 0, is_kept=True)
    assert seen == [0, 1] * len(pairs[0][0].counts)


def test_a_turn_has_several_short_steps(start):
    seen, pairs = [], [start(), start()]
    pairs = [(run, Polled(backend, i, seen)) for i, (run, backend) in enumerate(pairs)]
    run_round(pairs, ticks(0.003), 0, is_kept=True)
    assert 1 < len(list(next(groupby(seen))[1])) < len(pairs[0][0].counts)


def test_engines_of_one_model_have_the_memory_that_is_asked_for(engines, start):
    small, large = (start(kv_tokens=tokens)[1].capacity() for tokens in (64, 120))
    assert (small.kv_tokens, large.kv_tokens) == (64, 120)
    assert engines.limits.kv_tokens > 120


def test_an_engine_that_takes_other_steps_is_refused(start):
    run, _ = start(kv_tokens=40)
    _, roomy = start()
    with pytest.raises(MeasureError, match="does not schedule as it is simulated"):
        run_round([(run, roomy)], ticks(1.0), 0, is_kept=True)


def test_a_row_that_fails_ends_the_round(start):
    run, backend = start()
    too_long = replace(run, rows=replace(ROWS, prompt=ROWS.prompt + 100))
    with pytest.raises(MeasureError, match="failed"):
        run_round([(too_long, backend)], ticks(1.0), 0, is_kept=True)


def test_a_scheduler_that_is_not_simulated_is_refused():
    with pytest.raises(ConfigError, match="native or vllm"):
        engines_of("none", BackendConfig(kind="fake"), EngineConfig())
