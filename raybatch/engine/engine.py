"""The engine's step loop: schedule, forward, sample, finish; one model on one device."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from raybatch.config import EngineConfig
from raybatch.config.environment import checks_engines
from raybatch.engine.drafts import LookupDrafter, accepted_rows, slots_to_restart
from raybatch.engine.finish_rules import FinishRules
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.pinned import DeviceQueue, current_device
from raybatch.engine.memory.swap import LearnedRecovery
from raybatch.engine.profile.module_profile import step_clock
from raybatch.engine.row_moves import RowMoves, accept_kv, state_with_kv
from raybatch.engine.sampling.sampler import Sampler, SampleResult
from raybatch.engine.scheduling.admission import expected_len
from raybatch.engine.sequences.block_manager import BlockManager, SwappedKV
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import EMPTY, Sequence, SequenceTable
from raybatch.engine.step import (
    StepForward,
    StepTokens,
    counted,
    learned_recovery,
    make_scheduler,
    row_limits,
    step_size,
)
from raybatch.records.arrays import Ints
from raybatch.records.types import Capacity, Completion, ReplicaStats, Request, SequenceState
from raybatch.text.detokenizer import StopChecker


class Engine:
    """Continuous batching on one runner: `add` requests, then call `step` until none is unfinished.

    Used by one thread. The sampler has the same slots as the engine. `max_batched_tokens` bounds
    `max_num_seqs`, see `Scheduler.schedule`.

    Args:
        recovery: decides how preempted sequences recover their KV; None measures what is faster.
        make_drafter: makes the drafter for the table of running sequences; None uses n-gram lookup
            if `speculative_tokens` is set.
        queue: of a device whose tokens are read while the next step runs; None takes that of a
            GPU, and reads tokens immediately on a CPU.

    Example:
        >>> from raybatch.records.types import Sampling
        >>> from raybatch.text.tokenizer import Tokenizer
        >>> config = EngineConfig(device="cpu", kv_cache_bytes=1 << 22, max_num_seqs=4)
        >>> runner = ModelRunner.load("demo", config)
        >>> sampler = Sampler(runner.spec.vocab_size, 4, runner.spec.eos_token_ids)
        >>> engine = Engine(runner, sampler, StopChecker(Tokenizer), config)
        >>> row = {"request_id": 7, "row_id": "a", "prompt_token_ids": np.arange(9)}
        >>> engine.add([Request(**row, sampling=Sampling(max_tokens=2, ignore_eos=True))])
        >>> engine.step(), engine.num_unfinished()
        ([], 1)
        >>> [(c.request_id, len(c.token_ids), c.finish_reason) for c in engine.step()]
        [(7, 2, 'length')]
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        stop_checker: StopChecker,
        config: EngineConfig,
        *,
        recovery: LearnedRecovery | None = None,
        make_drafter: Callable[[SequenceTable], LookupDrafter] | None = None,
        queue: DeviceQueue | None = None,
    ) -> None:
        spec, block_size = runner.spec, config.block_size_tokens
        self.runner = runner
        self._sampler = sampler
        self._limits = row_limits(runner, config)
        self._max_model_len = self._limits.max_model_len
        self._max_batched_tokens = config.token_budget
        self._max_slots = min(config.max_num_seqs, config.token_budget)
        self.table = SequenceTable(
            max_slots=self._max_slots,
            num_blocks=runner.num_blocks,
            block_size=block_size,
            max_model_len=self._max_model_len,
        )
        self.blocks = BlockManager(runner.num_blocks, block_size)
        self._recovery = learned_recovery(runner, config) if recovery is None else recovery
        self._scheduler = make_scheduler(config, runner, self.blocks, self.table, self._recovery)
        self.moves = RowMoves(self._scheduler, runner, self.export)
        self._forward = StepForward(runner, self.table)
        self._rules = FinishRules(self._max_slots, spec.eos_token_ids, stop_checker)
        self._clock = step_clock(runner.device)
        if make_drafter is None and config.num_drafts:
            make_drafter = partial(LookupDrafter, max_tokens=config.num_drafts)
        self._drafter = make_drafter(self.table) if make_drafter is not None else None
        is_gpu = runner.device.type == "cuda"
        queue = DeviceQueue(runner.device) if queue is None and is_gpu else queue
        # drafts and window parts need the previous tokens; swap timing needs synchronous steps
        has_copies = self._recovery is not None or runner.tiers.num_host_blocks > 0
        queue = None if has_copies or self._drafter or runner.num_window_blocks else queue
        self._tokens = StepTokens(sampler, self.table, queue)
        self._num_open, self._ended = dict[int, int](), list[Completion]()
        self._num_arrivals = self._num_steps = self._num_generated_tokens = 0
        self._num_accepted_tokens, self._engine_s = 0, 0.0
        self._step_size, self._is_checked = step_size(runner, config), checks_engines()
        # called in each step after scheduling
        self.on_scheduled: Callable[[], None] = lambda: None

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests in this order; `step` returns invalid ones with an error.

        Raises ValueError: the request id is already in the engine.
        """
        for request in requests:
            if request.request_id in self._num_open:
                raise ValueError(f"request {request.request_id} is already in the engine")
            self._num_open[request.request_id] = request.sampling.n
            for sample_idx in range(request.sampling.n):
                state = SequenceState(request=request, sample_idx=sample_idx)
                self._queue(state, has_started=False)

    def restore(self, states: Iterable[SequenceState]) -> None:
        """Resume exported sequences, ahead of those that have not started."""
        for state in states:
            request_id = state.request.request_id
            self._num_open[request_id] = self._num_open.get(request_id, 0) + 1
            self._queue(state, has_started=True)

    def step(self) -> list[Completion]:
        """Run one step and return the samples that finished in it.

        Raises Exception: any error of the runner or `check`; only `leave` may be called afterwards.
        """
        began = time.perf_counter()
        if self._scheduler.num_waiting or self.table.num_running:
            with current_device(self.runner.device):
                self._run_step()
        if self._is_checked and not (self._scheduler.num_waiting or self.table.num_running):
            self.check()
        completions, self._ended = self._ended, []
        for completion in completions:
            self._close(completion.request_id)
        self._engine_s += time.perf_counter() - began
        return completions

    def num_unfinished(self) -> int:
        return len(self._num_open)

    def drain(self) -> list[Request]:
        """Remove and return the requests without a started sample, in order of submission."""
        waiting = [r.request for r in self._scheduler.waiting() if not r.has_started]
        num_waiting = Counter(request.request_id for request in waiting)
        # only requests with all samples waiting: elsewhere all samples run again
        whole = {r.request_id for r in waiting if num_waiting[r.request_id] == r.sampling.n}
        taken = self._scheduler.withdraw(
            lambda r: not r.has_started and r.request.request_id in whole
        )
        requests = {r.request.request_id: r.request for r in taken}
        for request_id in requests:
            del self._num_open[request_id]
        return list(requests.values())

    def abort(self, request_ids: Collection[int]) -> None:
        """Drop requests, without completions. Unknown ids are ignored."""
        self.export(request_ids)
        self._ended = [c for c in self._ended if c.request_id not in request_ids]
        for request_id in request_ids:
            self._num_open.pop(request_id, None)
            self.moves.forget(request_id)

    def leave(
        self, *, with_kv: bool
    ) -> tuple[list[SequenceState], list[Request], list[Completion]]:
        """Remove and return everything in the engine.

        Returns (states of started sequences, requests that have not started, completions of failed
        samples); `with_kv` adds copies of the KV to the states.
        """
        failed, self._ended = self._ended, []
        for completion in failed:
            self._close(completion.request_id)
        unstarted, begun = self.drain(), list(self._num_open)
        return self.export(begun, with_kv=with_kv, once=True), unstarted, failed

    def begin_drafts(self, max_tokens: int) -> bool:
        """Start speculation with up to `max_tokens` drafts per row; False if it is not possible.

        It is not if it runs already.
        """
        if self._drafter is not None or self._tokens.is_ahead or self.runner.num_window_blocks:
            return False
        self._drafter = LookupDrafter(self.table, max_tokens)
        for slot in np.flatnonzero(self.table.phase != EMPTY).tolist():
            self._draft_for(slot)
        return True

    def end_drafts(self) -> None:
        self._drafter = None

    def checkpoint(self, min_new_tokens: int) -> list[SequenceState]:
        """Return states of running sequences that have `min_new_tokens` tokens more.

        More than when this method last returned them; they keep running.
        """
        return self.table.checkpoint(min_new_tokens)

    def export(
        self,
        request_ids: Collection[int],
        *,
        with_kv: bool = False,
        from_block: int = 0,
        once: bool = False,
    ) -> list[SequenceState]:
        """Remove the unfinished sequences of these requests; return their states by arrival.

        `with_kv` adds copies of their computed KV, from block `from_block` of each sequence on.
        With `once`, shared blocks are copied only for the first sequence; an engine that restores
        all of the sequences finds them.
        """
        wanted, places = set(request_ids), dict[int, SwappedKV | None]()
        if with_kv:
            places = self._scheduler.kv_places(wanted, from_block=from_block, once=once)
        records = self._scheduler.withdraw(lambda r: r.request.request_id in wanted)
        for slot in np.flatnonzero(self.table.phase != EMPTY).tolist():
            if self.table.record(slot).request.request_id in wanted:
                self._clear_slot(slot)
                records.append(self._scheduler.remove(slot))
        records.sort(key=lambda record: record.arrival)
        for record in records:
            self._close(record.request.request_id)
        # their former blocks have not been overwritten yet
        return [state_with_kv(r.state(), places.get(r.arrival), self.runner) for r in records]

    @property
    def row_tokens(self) -> int:
        """Return the tokens of the longest row that fits into memory."""
        return self._limits.kv_tokens

    def capacity(self) -> Capacity:
        block_size = self.blocks.block_size
        return Capacity(
            kv_tokens=self.blocks.num_blocks * block_size,
            max_model_len=self._max_model_len,
            max_num_seqs=self._max_slots,
            block_size=block_size,
            max_batched_tokens=self._max_batched_tokens,
            kv_token_bytes=self.runner.tiers.block_bytes // block_size,
        )

    def stats(self) -> ReplicaStats:
        return replace(
            counted(self._scheduler, self.runner, self.blocks),
            num_running=self.table.num_running,
            num_steps=self._num_steps,
            generated_tokens=self._num_generated_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            engine_s=self._engine_s,
        )

    def check(self) -> None:
        """Raise RuntimeError if an invariant of blocks or sequences is broken."""
        self._scheduler.check()

    def _queue(self, state: SequenceState, *, has_started: bool) -> None:
        request = state.request
        refusal = self._sampler.refusal(request.sampling)
        failure = self._limits.find_failure(state, refusal=refusal)
        if failure is not None:
            self.moves.forget(request.request_id)
            self._ended.append(failure)
            return
        num_prompt = len(request.prompt_token_ids)
        max_len = min(num_prompt + request.sampling.max_tokens, self._max_model_len)
        logprobs = list(state.logprobs or ()) if request.sampling.logprobs is not None else None
        self._num_arrivals += 1
        carried = None if state.kv is None else accept_kv(state, self.runner.kv_key)
        num_tokens, num_reported = num_prompt + len(state.token_ids), state.num_reported
        num_computed = num_tokens if state.kv is None else state.kv.num_tokens
        self._scheduler.add(
            Sequence(
                request=request,
                sample_idx=state.sample_idx,
                arrival=self._num_arrivals,
                max_len=max_len,
                expected_len=expected_len(request, max_len),
                token_ids=state.token_ids,
                num_cached_tokens=state.num_cached_tokens,
                num_computed_before=num_computed if has_started else 0,
                has_started=has_started,
                swapped=carried,
                logprobs=logprobs,
                num_reported=len(state.token_ids) if num_reported is None else num_reported,
            )
        )

    def _run_step(self) -> None:
        # if this step fails, `leave` returns what ended in it
        completions = self._ended
        drafts = self._drafter.propose() if self._drafter is not None else {}
        # read tokens before a possible preemption, so that no sequence loses one
        if self._tokens.is_unread and len(self.table.full_slots()) > self.blocks.num_available:
            completions += self._settle()
        most_tokens = self.runner.most_step_tokens
        if most_tokens is None and self._step_size is not None:
            # size the step by time, but keep room for prompts next to many decodes
            tokens = self._step_size.tokens
            most_tokens = max(tokens, self.table.num_running + tokens // 2)
        schedule = self._scheduler.schedule(drafts, most_tokens=most_tokens)
        for slot in schedule.preempted:
            self._clear_slot(slot)
        for slot in schedule.admitted:
            self._fill_slot(slot)
        completions += [record.completion("capacity") for record in schedule.ended]
        self.on_scheduled()
        has_rows = schedule.num_tokens > 0 or len(schedule.forked) > 0
        completions += self._compute(schedule) if has_rows else self._settle()

    def _compute(self, schedule: Schedule) -> list[Completion]:
        """Compute a step; on a GPU, read the tokens of the previous step meanwhile."""
        began = time.perf_counter()
        # with drafts, a step ends when its tokens are on the host
        clock_began = self._clock() if self._drafter is not None else 0.0
        has_fork = self._scheduler.shared.has_fork
        logits, slots = self._forward.run(
            schedule, self._tokens.late(schedule.decode_slots), has_fork
        )
        self._num_steps += 1
        step = None
        if logits is not None and len(slots):
            num_generated = self._tokens.num_generated(slots)
            if len(schedule.draft_tokens):
                num_generated[: len(schedule.draft_places)] += schedule.draft_places
            step = self._tokens.draw(schedule, logits, slots, num_generated)
        completions = self._settle()
        self._scheduler.advance(schedule)
        if step is not None:
            self._tokens.hold(step)
            if step.drawn is None:
                completions += self._settle()
        if not schedule.num_tokens:
            return completions
        if self._step_size is not None and len(schedule.chunk_slots):
            self._step_size.note(schedule.num_tokens, time.perf_counter() - began)
        if self._recovery is not None:
            self._recovery.note(schedule, self.table, time.perf_counter() - began)
        if self._drafter is not None and not len(schedule.chunk_slots):
            self._drafter.note_step(schedule.num_tokens, self._clock() - clock_began)
        return completions

    def _settle(self) -> list[Completion]:
        """Append the sampled tokens of the pending step to their sequences."""
        taken = self._tokens.take()
        return [] if taken is None else self._take_tokens(*taken)

    def _take_tokens(
        self, schedule: Schedule, slots: Ints, result: SampleResult
    ) -> list[Completion]:
        table, completions, is_good = self.table, list[Completion](), result.is_finite
        for slot in slots_to_restart(schedule, is_good).tolist():
            self._clear_slot(slot)
            record, blocks = self._scheduler.restart(slot)
            record.may_draft = False
            self.runner.clear_blocks(blocks)
        for slot in slots[~is_good].tolist():
            if table.phase[slot] != EMPTY:
                completions.append(self._fail(slot))
        # without drafts each slot has one row
        rounds = [np.arange(len(slots))]
        if len(schedule.draft_lens):
            rounds = accepted_rows(schedule, result.token_ids)
        for number, rows in enumerate(rounds):
            # drop tokens that were sampled after the end of a sequence
            rows = rows[table.phase[slots[rows]] != EMPTY]
            if number:
                table.num_computed[slots[rows]] += 1
                self._num_accepted_tokens += len(rows)
            completions += self._append(rows, slots, result)
        return completions

    def _append(self, rows: Ints, slots: Ints, result: SampleResult) -> list[Completion]:
        """Append one token to each of these slots; return the sequences that end."""
        table, slots, token_ids = self.table, slots[rows], result.token_ids[rows]
        if result.logprobs is not None:
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
                collected, logprobs = table.record(slot).logprobs, result.logprobs[row]
                if collected is not None and logprobs is not None:
                    collected.append(logprobs)
        table.append_tokens(slots, token_ids)
        self._num_generated_tokens += len(slots)
        num_generated = table.num_tokens[slots] - table.num_prompt[slots]
        max_generated = table.max_len[slots] - table.num_prompt[slots]
        completions = []
        for slot, reason, stop_reason in self._rules.find(
            slots, token_ids, num_generated, max_generated
        ):
            self._clear_slot(slot)
            completions.append(self._scheduler.finish(slot).completion(reason, stop_reason))
        return completions

    def _fail(self, slot: int) -> Completion:
        self._clear_slot(slot)
        record, blocks = self._scheduler.discard(slot)
        self.runner.clear_blocks(blocks)
        error = f"the model returned NaN or infinite logits after {record.num_tokens} tokens"
        return record.completion("error", error=f"NonFiniteLogits: {error}")

    def _fill_slot(self, slot: int) -> None:
        record = self.table.record(slot)
        request = record.request
        prompt, generated = request.prompt_token_ids, record.token_ids
        self._sampler.add(
            slot, request.sampling, request.seed, record.sample_idx, prompt, generated
        )
        self._rules.add(slot, request.sampling, prompt, generated)
        if self._drafter is not None:
            self._draft_for(slot)

    def _draft_for(self, slot: int) -> None:
        record = self.table.record(slot)
        is_stateless = self._sampler.is_stateless(record.request.sampling)
        if self._drafter is not None and record.may_draft and is_stateless:
            self._drafter.add(slot)

    def _clear_slot(self, slot: int) -> None:
        self._tokens.drop(slot)
        self._sampler.remove(slot)
        self._rules.remove(slot)
        if self._drafter is not None:
            self._drafter.remove(slot)

    def _close(self, request_id: int) -> None:
        self._num_open[request_id] -= 1
        if not self._num_open[request_id]:
            del self._num_open[request_id]
