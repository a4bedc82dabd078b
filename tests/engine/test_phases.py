"""An engine that is rebuilt while rows run: same tokens, no lost row, counters continue."""

import gc
import logging
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from raybatch.backends.native import NativeBackend
from raybatch.config import EngineConfig
from raybatch.engine import phases
from raybatch.engine.engine import Engine
from raybatch.engine.loading import runner as runner_module
from raybatch.engine.loading.loaded_model import LoadedModel
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.phases import PhasedEngine, RowsSeen
from raybatch.engine.sampling.sampler import Sampler
from raybatch.errors import ConfigError
from raybatch.models.config import read_model_spec
from raybatch.policy import choose_engine as choose_engine_module
from raybatch.policy.choose_engine import EngineChoice, ExecutionMode
from raybatch.records.types import Completion, SequenceState
from tests.backends.test_native_backend import greedy_reference, run, shared_prompts
from tests.engine.fakes import FakeStopChecker, make_request
from tests.tiers import some

BLOCK = 4
LEAST_WEIGHT_BYTES = 480_000
VARIANT = "qwen3-moe"
MODEL_FIELDS = LoadedModel.__slots__


@pytest.fixture(scope="module")
def path(tiny_checkpoint):
    return tiny_checkpoint(VARIANT)


@pytest.fixture(autouse=True)
def looks_at_every_step(shared_cache, monkeypatch):
    monkeypatch.setattr(phases, "_STEPS_OF_LOOK", 1)
    monkeypatch.setattr(phases, "_STEPS_OF_REST", 1)
    # no decision depends on the clock of a busy host
    monkeypatch.setattr(choose_engine_module, "_MAX_DRIFT", 1e9)


def mode(*, on_host, seconds, budget=64):
    return ExecutionMode(
        kv_offload=on_host,
        max_batched_tokens=budget,
        rows_together=8,
        rows_attending=8,
        seconds=seconds,
        tokens_per_s=1 / seconds,
    )


def choice(*candidates):
    """Return a choice of the first candidate."""
    other = candidates[1] if len(candidates) > 1 else None
    return EngineChoice(
        best=candidates[0],
        runner_up=other,
        reason="the script",
        candidates=candidates,
        draft_rows=phases._TAIL_ROWS,
    )


ON_DEVICE = choice(mode(on_host=False, seconds=1.0), mode(on_host=True, seconds=1e6))
ON_HOST = choice(mode(on_host=True, seconds=1.0), mode(on_host=False, seconds=1e6))


class Scripted(PreparedModel):
    """Returns scripted choices in order, and records the rows of each request."""

    def choose(self, rows):
        self.requested.append(rows)
        return self.choices.pop(0) if len(self.choices) > 1 else self.choices[0]

    @property
    def may_choose(self):
        return self.choices[0] is not None


def make(path, *choices, kind=Scripted, num_blocks=60, host=300, link_factor=1.0, **options):
    block_bytes = BLOCK * kv_bytes_per_token(read_model_spec(path), torch.float32)
    config = EngineConfig(
        **(
            {
                "block_size_tokens": BLOCK,
                "dtype": "float32",
                "device": "cpu",
                "max_batched_tokens": 64,
                "max_num_seqs": 17,
                "kv_cache_bytes": num_blocks * block_bytes,
                "host_kv_bytes": host * block_bytes,
            }
            | options
        )
    )
    prepared = kind.load(str(path), config)
    prepared.choices, prepared.requested = list(choices), []
    prepared.link_factor = link_factor

    def engine(runner):
        sampler = Sampler(runner.spec.vocab_size, config.max_num_seqs, runner.spec.eos_token_ids)
        return Engine(runner, sampler, FakeStopChecker(), runner.config)

    return PhasedEngine(prepared, engine), prepared


def is_on_host(engine):
    return engine.runner.num_window_blocks > 0


@pytest.mark.parametrize(("seed", "n"), some([(1, 3), (0, 1), (2, 1), (3, 3)]))
def test_changes_at_any_step_change_no_token(path, rng, seed, n):
    prompts = shared_prompts(rng)
    engine, _ = make(path, ON_DEVICE, num_blocks=[18, 60, 400][seed % 3])
    changes = np.random.default_rng(seed)
    step, places = engine.step, set()

    def stepped():
        if changes.random() < 0.15:
            engine._change(ON_DEVICE if is_on_host(engine) else ON_HOST)
        places.add(is_on_host(engine))
        return step()

    engine.step = stepped
    done = run(NativeBackend(engine), prompts, n=n)
    expected = greedy_reference(VARIANT, prompts)
    for sample_idx in range(n):
        assert expected == [done[i, sample_idx].token_ids.tolist() for i in range(len(prompts))]
    assert places == {False, True}
    stats = engine.stats()
    assert stats.generated_tokens >= sum(len(tokens) for tokens in expected)
    assert not engine.num_unfinished()
    engine.engine.check()


def test_random_draws_and_logprobs_continue_unchanged(path, rng):
    prompts, found = shared_prompts(rng), []
    for changes in (False, True):
        engine, _ = make(path, ON_DEVICE)
        step = engine.step

        def stepped(step=step, engine=engine, changes=changes):
            if changes and engine.stats().num_steps % 5 == 4:
                engine._change(ON_DEVICE if is_on_host(engine) else ON_HOST)
            return step()

        engine.step = stepped
        done = run(NativeBackend(engine), prompts, temperature=0.8, top_p=0.9, logprobs=2)
        found.append(
            {
                key: (c.token_ids.tolist(), [ids.tolist() for ids, _ in c.logprobs])
                for key, c in done.items()
            }
        )
    assert found[0] == found[1]


def test_tokens_that_were_not_reported_before_a_change_are_reported_after_it(path):
    engine, _ = make(path, ON_DEVICE)
    engine.add([make_request(0, [1, 2, 3], max_tokens=30)])

    def steps(count):
        for _ in range(count):
            assert not engine.step()

    steps(4)
    assert not engine.checkpoint(5)
    engine._change(ON_HOST)
    steps(1)
    assert [5] == [len(state.token_ids) for state in engine.checkpoint(5)]
    # each token once, also after two changes in a row
    for choice in (ON_DEVICE, ON_HOST):
        engine._change(choice)
        steps(2)
        assert not engine.checkpoint(5)
    steps(1)
    assert [10] == [len(state.token_ids) for state in engine.checkpoint(5)]


def test_an_engine_reports_the_capacity_of_its_execution_mode(path):
    engine, _ = make(path, ON_DEVICE, num_blocks=60, host=300, max_batched_tokens="auto")
    before = engine.capacity()
    assert before.kv_tokens == 60 * BLOCK
    engine._change(choice(mode(on_host=True, seconds=1.0, budget=16)))
    now = engine.capacity()
    assert (now.kv_tokens, now.max_batched_tokens, now.max_num_seqs) == (300 * BLOCK, 16, 16)
    assert engine.stats().kv_tokens == now.kv_tokens


def test_a_callback_gets_the_rows_of_each_step_before_it_is_computed(path):
    engine, _ = make(path, ON_DEVICE)
    backend, seen = NativeBackend(engine), []
    backend.watch(lambda: seen.append((backend.stats().num_running, backend.stats().num_steps)))
    engine.add([make_request(i, [1, 2, 3], max_tokens=5) for i in range(2)])
    backend.poll()
    engine._change(ON_HOST)
    backend.poll()
    assert seen == [(2, 0), (2, 1)]


def test_a_mode_is_chosen_for_the_first_rows_before_they_run(path, caplog):
    engine, prepared = make(path, ON_DEVICE, ON_HOST)
    assert not is_on_host(engine)
    with caplog.at_level(logging.INFO):
        engine.add([make_request(i, [1, 2, 3, 4, 5], max_tokens=20) for i in range(3)])
    assert is_on_host(engine)
    assert "runs with the script" in caplog.text
    assert "of the first rows: 5 prompt and 20 output tokens a row" in caplog.text
    assert prepared.requested[-1].shape.output_tokens == 20
    # similar rows cause no new request
    num_requested = len(prepared.requested)
    while engine.num_unfinished():
        engine.step()
    requested_at_end = len(prepared.requested)
    engine.add([make_request(9, [1, 2, 3, 4, 5], max_tokens=20)])
    assert len(prepared.requested) == requested_at_end >= num_requested


def test_a_gain_below_the_cost_of_a_change_changes_nothing(path):
    small = choice(mode(on_host=True, seconds=1.0), mode(on_host=False, seconds=1.00001))
    engine, _ = make(path, ON_DEVICE, small)
    engine.add([make_request(0, [1, 2, 3], max_tokens=20)])
    assert not is_on_host(engine)


def test_shared_kv_is_copied_once_and_priced_once(path, rng):
    prefix = rng.integers(1, 200, 100).tolist()
    prompts = [[*prefix, *rng.integers(1, 200, 3 + i).tolist()] for i in range(8)]
    # the host holds 100 blocks; the rows have 8 * 27, of which 25 are the same
    engine, prepared = make(path, ON_DEVICE, num_blocks=300, host=100)
    expected = run(NativeBackend(engine), prompts)
    step, used = engine.step, []

    def stepped():
        if engine.engine.table.num_running == 8 and not used:
            prepared.choices = [ON_HOST]
            used.append(engine.engine.blocks.num_used)
            engine._ask(engine._seen.ahead(), when="of a test")
            assert is_on_host(engine)
        return step()

    engine.step = stepped
    done = run(NativeBackend(engine), prompts)
    assert [c.token_ids.tolist() for c in expected.values()] == [
        done[key].token_ids.tolist() for key in expected
    ]
    assert 25 + 8 <= used[0] <= 25 + 8 * 4
    stats = engine.stats()
    assert (stats.num_recomputed_tokens, stats.num_preemptions) == (0, 0)
    # the last block of each row is not full
    assert (used[0] - 8) * BLOCK < stats.num_migrated_kv_tokens <= used[0] * BLOCK


def test_kv_that_the_host_has_no_memory_for_is_computed_again(path, rng):
    prompts = shared_prompts(rng)
    engine, prepared = make(path, ON_DEVICE)
    step = engine.step

    def stepped():
        if engine.stats().num_steps == 4:
            prepared.budget = replace(prepared.budget, host_kv_bytes=2 * prepared.block_bytes)
            engine._change(ON_DEVICE)
        return step()

    engine.step = stepped
    done = run(NativeBackend(engine), prompts)
    expected = greedy_reference(VARIANT, prompts)
    assert expected == [done[i, 0].token_ids.tolist() for i in range(len(prompts))]
    assert engine.stats().num_migrated_kv_tokens == 0
    assert engine.stats().num_recomputed_tokens > 0


def test_the_last_rows_move_to_the_device(path, rng):
    prompts = shared_prompts(rng)
    engine, prepared = make(path, ON_HOST)
    step, moved_at = engine.step, []

    def stepped():
        stats = engine.stats()
        if not moved_at and stats.num_steps and not stats.num_waiting:
            prepared.choices = [ON_DEVICE]
        done = step()
        if not is_on_host(engine) and not moved_at:
            moved_at.append(engine.stats())
        return done

    engine.step = stepped
    done = run(NativeBackend(engine), prompts)
    expected = greedy_reference(VARIANT, prompts)
    assert expected == [done[i, 0].token_ids.tolist() for i in range(len(prompts))]
    (stats,) = moved_at
    assert stats.num_running + stats.num_waiting > 0
    assert any(rows.num_rows is not None for rows in prepared.requested)
    # with their KV
    assert engine.stats().num_migrated_kv_tokens > 0
    assert engine.stats().num_recomputed_tokens < 100


def test_an_engine_continues_if_its_successor_cannot_be_built(path, rng, monkeypatch, caplog):
    prompts = shared_prompts(rng)
    engine, prepared = make(path, ON_DEVICE, ON_HOST)

    def refuse(choice):
        if choice is ON_HOST:
            raise ConfigError("the host gives no memory")
        return type(prepared).__mro__[1].chosen(prepared, choice)

    monkeypatch.setattr(prepared, "chosen", refuse)
    done = run(NativeBackend(engine), prompts)
    assert "runs as before: could not build the chosen execution mode" in caplog.text
    assert not is_on_host(engine)
    expected = greedy_reference(VARIANT, prompts)
    assert expected == [done[i, 0].token_ids.tolist() for i in range(len(prompts))]


def test_an_engine_whose_host_gives_no_memory_starts_with_kv_on_the_device(path, monkeypatch):
    chosen = PreparedModel.chosen

    def refuse(prepared, choice):
        if choice is ON_HOST:
            raise ConfigError("the host gives no memory")
        return chosen(prepared, choice)

    monkeypatch.setattr(PreparedModel, "choose", lambda prepared, rows: ON_HOST)
    monkeypatch.setattr(PreparedModel, "chosen", refuse)
    monkeypatch.setattr(Scripted, "choose", PreparedModel.choose)
    engine, _ = make(path, None)
    assert not is_on_host(engine)
    assert "could not allocate" in engine.stats().execution_mode
    monkeypatch.setattr(PreparedModel, "chosen", lambda *_: refuse(None, ON_HOST))
    with pytest.raises(ConfigError, match="gives no memory"):
        make(path, None)


def test_a_bad_row_is_reported_once_when_the_engine_changes(path):
    engine, _ = make(path, ON_DEVICE)
    engine.add([make_request(0, [], max_tokens=3), make_request(1, [1, 2], max_tokens=3)])
    engine._change(ON_HOST)
    assert engine.num_unfinished() == 2
    done = []
    while engine.num_unfinished():
        done += engine.step()
    assert sorted((c.request_id, bool(c.error)) for c in done) == [(0, True), (1, False)]


def test_links_and_layers_that_are_slower_than_measured_are_noted(path, monkeypatch):
    engine, prepared = make(path, ON_DEVICE, host=300)
    prepared.choices = [None]
    monkeypatch.setattr(Scripted, "may_choose", True)
    monkeypatch.setattr(choose_engine_module, "_MAX_DRIFT", 0.2)
    seconds = iter(float(i) for i in range(10**6))
    # a second of a step
    monkeypatch.setattr(engine, "_clock", lambda: next(seconds))
    engine.add([make_request(i, [1, 2, 3, 4], max_tokens=30) for i in range(12)])
    for _ in range(6):
        engine.step()
    assert prepared.module_factor > 10
    assert prepared.requested[-1].shape.prompt_tokens == 4


class OnGpu(LoadedModel):
    """A model on a CPU that reports a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize("steps_of_trust", [10_000, 0])
def test_first_steps_on_a_gpu_correct_costs_and_change_nothing(path, monkeypatch, steps_of_trust):
    engine, prepared = make(path, ON_DEVICE, host=300)
    prepared.choices = [None]
    prepared.model = OnGpu(**{name: getattr(prepared.model, name) for name in MODEL_FIELDS})
    monkeypatch.setattr(Scripted, "may_choose", True)
    monkeypatch.setattr(phases, "_STEPS_OF_TRUST", steps_of_trust)
    monkeypatch.setattr(choose_engine_module, "_MAX_DRIFT", 0.2)
    seconds = iter(float(i) for i in range(10**6))
    monkeypatch.setattr(engine, "_clock", lambda: next(seconds))
    engine.add([make_request(i, [1, 2, 3, 4], max_tokens=30) for i in range(12)])
    for _ in range(5):
        engine.step()
    assert prepared.module_factor > 10
    # for usual rows, for the first ones, and again when step times differ
    assert (len(prepared.requested) > 2) == (steps_of_trust == 0)
    # the correction holds for the execution mode that has run
    assert prepared.budget.proven == {ON_DEVICE.best.key}


def test_the_last_rows_are_drafted_for(path):
    # answers of a tiny model repeat themselves
    requests = [make_request(i, [7, 8, 9, 7, 8], max_tokens=120) for i in range(40)]
    tokens = {}
    for drafts in ("auto", 0):
        engine, _ = make(path, None, speculative_tokens=drafts, num_blocks=2000, host_kv_bytes=None)
        engine.add(requests)
        done = []
        while engine.num_unfinished():
            done += engine.step()
        tokens[drafts] = {c.request_id: c.token_ids.tolist() for c in done}
        assert (engine.stats().num_drafted_tokens > 0) == (drafts == "auto")
    assert tokens["auto"] == tokens[0]


def test_drafts_of_a_lull_stop_when_rows_follow(path):
    engine, prepared = make(path, ON_HOST, speculative_tokens="auto")

    def more(first, count, max_tokens):
        rows = range(first, first + count)
        engine.add([make_request(i, [7, 8, 9, 7, 8], max_tokens=max_tokens) for i in rows])

    def steps(count):
        for _ in range(count):
            engine.step()

    more(0, 24, 30)
    steps(10)
    prepared.choices = [ON_DEVICE]
    while engine.num_unfinished() > 4:
        engine.step()
    steps(3)
    assert not is_on_host(engine)
    steps(3)
    assert engine._drafts_tail
    # other rows arrive while these run
    prepared.choices = [ON_HOST]
    more(100, 40, 30)
    steps(3)
    assert is_on_host(engine)
    assert not engine._drafts_tail
    assert prepared.requested[-1].num_rows is None
    while engine.num_unfinished():
        engine.step()


def test_a_row_that_the_current_mode_cannot_hold_causes_a_choice_while_others_run(path):
    engine, prepared = make(path, ON_DEVICE, num_blocks=16)
    engine.add([make_request(0, [1, 2, 3], max_tokens=30)])
    engine.step()
    assert not is_on_host(engine)
    prepared.choices = [choice(mode(on_host=True, seconds=1.0))]
    engine.add([make_request(1, list(range(1, 90)), max_tokens=3)])
    assert is_on_host(engine)
    done = []
    while engine.num_unfinished():
        done += engine.step()
    assert [c.error for c in done] == ["", ""]


@pytest.mark.parametrize("moves_in", [False, True])
def test_a_row_that_would_end_by_capacity_causes_a_choice_while_others_run(path, moves_in):
    engine, prepared = make(path, ON_DEVICE, num_blocks=16)
    engine.add([make_request(0, [1, 2, 3], max_tokens=30)])
    engine.step()
    prepared.choices = [choice(mode(on_host=True, seconds=1.0))]
    # its prompt fits, its possible output does not
    request = make_request(1, [1, 2, 3], max_tokens=80)
    if moves_in:
        engine.restore([SequenceState(request=request, sample_idx=0)])
    else:
        engine.add([request])
    assert is_on_host(engine)
    assert prepared.requested[-1].longest_tokens == 83
    # once is enough
    num_requested = len(prepared.requested)
    engine.add([make_request(2, [1, 2, 3], max_tokens=80)])
    assert len(prepared.requested) == num_requested
    done = []
    while engine.num_unfinished():
        done += engine.step()
    assert {"length"} == {c.finish_reason for c in done}


@pytest.mark.parametrize("num_short", some([60, 0]))
@pytest.mark.parametrize("link_factor", [1e-6, 1e6], ids=["fast-link", "slow-link"])
def test_rows_that_no_memory_holds_end_alike_in_each_mode(path, link_factor, num_short):
    engine, _ = make(path, kind=PreparedModel, num_blocks=16, host=20, link_factor=link_factor)
    engine.add([make_request(i, [1, 2, 3, 4], max_tokens=4) for i in range(num_short)])
    for _ in range(3):
        engine.step()
    engine.add([make_request(100 + i, [1, 2, 3, i], max_tokens=120) for i in range(3)])
    done = []
    while engine.num_unfinished():
        done += engine.step()
    long = [c for c in done if c.request_id >= 100]
    # 80 tokens with KV, and one without
    assert [("capacity", 80 - 4 + 1)] * 3 == [(c.finish_reason, len(c.token_ids)) for c in long]


def test_a_pool_that_could_not_be_built_is_freed_before_the_next_one(path, monkeypatch):
    engine, _ = make(path, ON_DEVICE)
    caches = []
    allocate = runner_module.allocate_kv_cache

    def counted(*args, **options):
        gc.collect()
        assert not [one for one in caches if one() is not None]
        cache = allocate(*args, **options)
        caches.append(weakref.ref(cache.k))
        return cache

    def fails(*args):
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(runner_module, "allocate_kv_cache", counted)
    monkeypatch.setattr(runner_module, "HostLayers", fails)
    engine._change(ON_HOST)
    assert len(caches) == 2
    assert not is_on_host(engine)


def test_counts_of_layers_that_outlive_an_engine_do_not_double(path, monkeypatch):
    engine, _ = make(path, ON_DEVICE, device_weight_bytes=LEAST_WEIGHT_BYTES)
    copier, starts = engine.runner.decoder.layers.buffers.copier, []
    start = copier.start

    def fails_once_ahead_of_use(*args):
        starts.append(args)
        if len(starts) == 2:
            raise RuntimeError("the copy engine has failed")
        return start(*args)

    monkeypatch.setattr(copier, "start", fails_once_ahead_of_use)
    engine.add([make_request(0, [1, 2, 3], max_tokens=9)])
    engine.step()
    before = engine.stats()
    assert before.num_weight_copies > 0
    assert before.num_failed_copies == 1
    for choice in (ON_HOST, ON_DEVICE):
        engine._change(choice)
        assert engine.stats().num_weight_copies == before.num_weight_copies
        assert engine.stats().num_failed_copies == 1
        assert engine.stats().num_steps == before.num_steps


def test_failed_copies_of_pools_add_up_over_changes(path):
    engine, _ = make(path, ON_HOST)
    engine.runner.window.counters.num_failures = 2
    engine._change(ON_DEVICE)
    engine._change(ON_HOST)
    engine.runner.window.counters.num_failures = 3
    assert engine.stats().num_failed_copies == 5


def test_the_longest_of_the_rows_at_hand_counts(path, monkeypatch):
    monkeypatch.setattr(phases, "_NUM_SEEN", 4)
    engine, prepared = make(path, ON_DEVICE, num_blocks=30)
    engine.add([make_request(0, [1, 2, 3], max_tokens=50)])
    engine.step()
    engine.add([make_request(i, [1, 2], max_tokens=5) for i in range(1, 9)])
    assert engine._seen.ahead().longest_tokens == 7
    engine._ask(engine._seen.ahead(), when="now")
    assert prepared.requested[-1].longest_tokens == 53


def test_last_rows_count_what_they_share_once(path):
    engine, _ = make(path, ON_DEVICE)
    document = list(range(1, 41))
    engine.add([make_request(i, [*document, 50 + i, 60 + i], max_tokens=6) for i in range(4)])
    while engine.engine.table.users.block_sharing()[0] == 0:
        engine.step()
    rows, size = engine._last_rows(), engine.engine.table.block_size
    num_shared = 40 // size * size
    assert rows.group_rows == 4
    assert rows.prefix_tokens == pytest.approx(num_shared)
    tokens, _ = engine.engine.table.running_lengths()
    assert rows.own_tokens == pytest.approx(float(tokens.mean()) - num_shared, abs=1)


def test_slower_layers_read_shared_prefixes_slower_too(path):
    _, prepared = make(path, ON_DEVICE)
    rows, before = prepared.usual_rows(), prepared.inputs(prepared.usual_rows())
    prepared.module_factor *= 3.0
    pairs = zip(
        before.costs.cascade.position_s, prepared.inputs(rows).costs.cascade.position_s, strict=True
    )
    assert all(3 * one == pytest.approx(other) for one, other in pairs)


def test_rows_seen_have_mean_and_longest_lengths():
    seen = RowsSeen(100)
    assert not seen
    prompt = list(range(10))
    seen.add([make_request(0, prompt, max_tokens=500), make_request(1, [], max_tokens=5)])
    # bounded by the context; a row that is refused does not count
    assert seen.ahead().shape.output_tokens == 90
    assert seen.ahead().longest_tokens == 100
    members = [
        replace(make_request(i, prompt, max_tokens=40), group_id=3, prefix_len=8)
        for i in range(2, 5)
    ]
    seen.add(members)
    # released, and submitted again
    seen.add(members)
    # 10 + 10 + 2 + 2
    assert seen.ahead().shape.prompt_tokens == 6
    assert seen.ahead().shared_tokens == 4
    seen.note([Completion(request_id=i, token_ids=np.arange(1 + i % 3)) for i in range(33)])
    assert seen.ahead().shape.output_tokens == 2
    assert seen.ahead().output_lengths[0] == pytest.approx(1, abs=0.1)
    seen.add([replace(make_request(9, prompt, max_tokens=40), expected_output_len=7)])
    assert seen.ahead().shape.output_tokens == 7
