"""Rebuilds the engine when another execution mode is forecast to finish sooner."""

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from raybatch.engine.engine import Engine
from raybatch.engine.loading.loaded_model import give_back_freed_memory
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.profile.module_profile import step_clock
from raybatch.engine.row_moves import RowMoves
from raybatch.engine.scheduling.admission import expected_len
from raybatch.engine.step import summed
from raybatch.errors import CapacityError, ConfigError, RankError, error_text
from raybatch.policy.choose_engine import EngineChoice, ExecutionMode, step_drift
from raybatch.policy.cost.layers import RowsAhead, RowShape
from raybatch.records.types import Capacity, Completion, ReplicaStats, Request, SequenceState

# steps between two checks, and after a change
_STEPS_OF_LOOK, _STEPS_OF_REST = 64, 512
# steps on a GPU before corrected costs may change the execution mode
_STEPS_OF_TRUST = 10_000
# ratio of lengths that counts as other rows than those of the last choice
_OTHER_LENGTH = 1.25
# drafts per row, and most rows, for speculation in the tail
_TAIL_DRAFTS, _TAIL_ROWS = 4, 32
_logger = logging.getLogger(__name__)


class EngineExtension:
    """Base class of optional mechanisms of an engine, such as those of raybatch-extensions.

    A subclass places weights while they are loaded (`PlaceWeights`). At run time it may replace
    feed-forward blocks (`Decoder.ffn_service`), passes (`ModelRunner.passes`) and the KV pool
    (`ModelRunner.blocks`). The hooks here do nothing. Pool extensions call further methods of a
    subclass by name; after a RankError in them the engine continues alone.

    Attributes:
        name: name that pool extensions use.
        is_exchanging: whether peers may wait for passes of this engine while it has no rows.
        keeps_engine: whether the engine must not be rebuilt now for another execution mode.
    """

    name: str

    @property
    def is_exchanging(self) -> bool:
        return False

    @property
    def keeps_engine(self) -> bool:
        return False

    def attach(self, runner: ModelRunner) -> None:
        """Attach to the runner of an engine that was built or rebuilt."""

    def note_rows(self) -> None:
        """Called after rows have ended or left the engine."""

    def serve(self) -> None:
        """Run a pass without rows if another engine waits for it."""

    def lose(self, error: RankError) -> None:
        """End cooperation with peers after one failed; rows are recomputed."""

    def capacity(self, found: Capacity) -> Capacity:
        """Return a capacity adjusted by this extension."""
        return found

    def stats(self, found: ReplicaStats) -> ReplicaStats:
        """Return counters, completed by those of this extension."""
        return found

    def close(self) -> None:
        """Stop background work; the engine is not used afterwards."""


class PhasedEngine:
    """Runs an `Engine` and rebuilds it when `choose_engine` selects another execution mode.

    Has the interface of `Engine`; used by one thread. It chooses again for the first rows, for a
    row that does not fit the current mode, when only the last rows decode, and when step times
    differ from the forecast. Running rows continue, with their KV if host memory can hold a copy;
    answers do not change.

    Args:
        make: makes an engine for a runner with the chosen options.
        extensions: optional mechanisms that the job's options enable.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        make: Callable[[ModelRunner], Engine],
        extensions: Iterable["MakeExtension"] = (),
    ) -> None:
        self.prepared, self._make_engine = prepared, make
        self.on_scheduled: Callable[[], None] = lambda: None
        self.extensions = {each.name: each for each in (make(self) for make in extensions)}
        self._clock = step_clock(prepared.model.device)
        self._past = ReplicaStats()
        self._left: list[Completion] = []
        self._seen = RowsSeen(prepared.model.resolved.max_model_len)
        self._chosen_for = prepared.usual_rows()
        self._choice = prepared.choose(self._chosen_for)
        self._mode = prepared.budget.plain_reason()
        if self._choice is None:
            _logger.info("%s runs with %s", prepared.model.name, self._mode)
        else:
            self._mode = self._logged(self._choice, self._chosen_for, when="of usual length")
        self._had_waiting = self._is_fixed = self._drafts_tail = False
        began = time.perf_counter()
        # the current engine
        self.engine = self._first_engine()
        self._build_s = time.perf_counter() - began
        self._num_steps, self._next_look, self._num_dry_looks = 0, _STEPS_OF_LOOK, 0
        self._seconds = self._copied_s = 0.0
        self._looked_at = self.engine.stats()

    def _first_engine(self) -> Engine:
        """Build the chosen engine, or one with KV on the device if host memory is short."""
        try:
            return self._built(self._choice)
        except (ConfigError, RuntimeError, MemoryError) as error:
            if self._choice is None or not self._choice.best.kv_offload:
                raise
            self._warn(error, "with KV on the device")
        self._choice, self._is_fixed = None, True
        self._mode = "KV on the device: could not allocate host memory for KV"
        return self._built(None)

    def _warn(self, error: Exception, how: str) -> None:
        name = self.prepared.model.name
        text = "%s runs %s: could not build the chosen execution mode: %s"
        _logger.warning(text, name, how, error_text(error))

    @property
    def runner(self) -> ModelRunner:
        return self.engine.runner

    @property
    def moves(self) -> RowMoves:
        """Row moves of the current engine; what a replaced engine has received is recomputed."""
        return self.engine.moves

    def capacity(self) -> Capacity:
        found = replace(self.engine.capacity(), weight_bytes=self.prepared.weight_bytes)
        for extension in self.extensions.values():
            found = extension.capacity(found)
        return found

    def add(self, requests: Sequence[Request]) -> None:
        self._expect(requests)
        self.engine.add(requests)

    def step(self) -> list[Completion]:
        began = self._clock()
        try:
            made = self.engine.step()
        except RankError as error:
            made = []
            self.go_on_alone(error)
        completions, self._left = [*self._left, *made], []
        self._note_rows()
        self._seconds += self._clock() - began
        self._num_steps += 1
        self._seen.note(completions)
        if self._num_steps >= self._next_look:
            self._next_look = self._num_steps + _STEPS_OF_LOOK
            self._poll()
        return completions

    def num_unfinished(self) -> int:
        return self.engine.num_unfinished() + len(self._left)

    def drain(self) -> list[Request]:
        return self.engine.drain()

    def abort(self, request_ids: Collection[int]) -> None:
        wanted = set(request_ids)
        self._left = [c for c in self._left if c.request_id not in wanted]
        self.engine.abort(request_ids)
        self._note_rows()

    def checkpoint(self, min_new_tokens: int) -> list[SequenceState]:
        return self.engine.checkpoint(min_new_tokens)

    def export(self, request_ids: Collection[int], *, with_kv: bool = False) -> list[SequenceState]:
        states = self.engine.export(request_ids, with_kv=with_kv)
        self._note_rows()
        return states

    def restore(self, states: Sequence[SequenceState]) -> None:
        self._expect([state.request for state in states])
        self.engine.restore(states)

    def _note_rows(self) -> None:
        for extension in self.extensions.values():
            extension.note_rows()

    def go_on_alone(self, error: RankError) -> None:
        """Continue the rows alone in a new engine, after a peer that computed with it failed."""
        states, unstarted, ended = self.engine.leave(with_kv=False)
        for extension in self.extensions.values():
            extension.lose(error)
        self._left += ended
        self._note_past()
        self.engine = self._make(self.engine.runner)
        self._drafts_tail = False
        self._go_on(states, unstarted)

    def _go_on(self, states: Sequence[SequenceState], unstarted: Sequence[Request]) -> None:
        """Hand the rows of the previous engine to the rebuilt one."""
        self.engine.restore(states)
        self.engine.add(unstarted)
        self._looked_at, self._seconds = self.engine.stats(), 0.0

    def stats(self) -> ReplicaStats:
        stats = replace(summed(self._past, self.engine.stats()), execution_mode=self._mode)
        for extension in self.extensions.values():
            stats = extension.stats(stats)
        return stats

    @property
    def _may_choose(self) -> bool:
        is_kept = any(extension.keeps_engine for extension in self.extensions.values())
        return self.prepared.budget.may_choose and not self._is_fixed and not is_kept

    def _expect(self, requests: Sequence[Request]) -> None:
        """Choose for the first rows, and for a row that does not fit the current mode."""
        longest = self._seen.add(requests)
        # a rebuild would lose the KV of migrating rows
        if not self._may_choose or not self._seen or not self.engine.moves.is_idle:
            return
        # the last token has no KV
        is_longer = longest > max(self.engine.row_tokens + 1, self._chosen_for.longest_tokens)
        is_idle = not self.engine.num_unfinished()
        # check cheap conditions first: `ahead` is slower
        if not is_longer and not is_idle:
            return
        rows = self._seen.ahead()
        if is_idle and _is_other(rows, self._chosen_for):
            self._ask(rows, when="of the first rows")
        elif is_longer:
            self._ask(rows, when="of a longer row")

    def _poll(self) -> None:
        """Check the steps since the last check, and the remaining rows."""
        stats, seconds, copied_s = self.engine.stats(), self._seconds, self._copied_s
        before, self._looked_at, self._seconds = self._looked_at, stats, 0.0
        self._copied_s = self.engine.runner.window_counters.copy_s
        self._had_waiting |= bool(stats.num_waiting)
        # require two checks: one may fall between two pulls of rows
        self._num_dry_looks = 0 if stats.num_waiting else self._num_dry_looks + 1
        is_tail = self._had_waiting and self._num_dry_looks > 1 and stats.num_running > 0
        if stats.num_waiting and self._drafts_tail:
            self.engine.end_drafts()
            self._drafts_tail = False
        if is_tail and self._begins_drafts(stats.num_running):
            return
        if self._choice is None or not self._may_choose:
            return
        was_tail = self._chosen_for.num_rows is not None
        if is_tail:
            if self._choice.best.kv_offload:
                self._ask(self._last_rows(), when="of the last rows")
        elif was_tail and stats.num_waiting:
            self._ask(self._seen.ahead(), when="of new rows after the tail")
        elif not was_tail and self._has_drifted(
            self._choice.best, before, stats, seconds, self._copied_s - copied_s
        ):
            self._ask(self._seen.ahead(), when="step times differ from the forecast")

    def _begins_drafts(self, num_running: int) -> bool:
        """Start speculation once few rows decode; return whether it started."""
        config, runner = self.prepared.config, self.engine.runner
        if self._drafts_tail or config.speculative_tokens != "auto":
            return False
        # drafts take blocks depending on time, which must not decide which rows are rounded
        if config.host_kv_dtype != "auto" or self.prepared.model.device.type != "cpu":
            return False
        most = _TAIL_ROWS if self._choice is None else self._choice.draft_rows
        if runner.num_window_blocks or num_running > most:
            return False
        self._drafts_tail = self.engine.begin_drafts(_TAIL_DRAFTS)
        return self._drafts_tail

    def _last_rows(self) -> RowsAhead:
        """Return the running rows and their remaining tokens; shared blocks count once."""
        table = self.engine.table
        tokens, left = table.running_lengths()
        num_shared, group_rows = table.users.block_sharing()
        shared_tokens = num_shared * table.block_size / len(tokens)
        return RowsAhead(
            shape=RowShape(
                prompt_tokens=max(1, round(float(tokens.mean()) - shared_tokens)),
                output_tokens=max(1, round(float(left.mean()))),
            ),
            num_rows=len(tokens),
            output_lengths=tuple(np.sort(left).tolist()) if left.min() < left.max() else (),
            longest_tokens=table.longest_len(),
            shared_tokens=shared_tokens,
            group_rows=group_rows,
        )

    def _has_drifted(
        self,
        mode: ExecutionMode,
        before: ReplicaStats,
        now: ReplicaStats,
        seconds: float,
        copy_s: float,
    ) -> bool:
        """Correct the costs by the measured step times; return whether to choose again."""
        inputs = self.prepared.inputs(self._chosen_for)
        if inputs is None:
            return False
        drift = step_drift(inputs, mode, before, now, seconds=seconds, copy_s=copy_s)
        # if the costs were wrong, no mode counts as proven
        budget = self.prepared.budget
        known = frozenset() if drift.is_far else budget.proven | {mode.key}
        self.prepared.budget = replace(budget, proven=known)
        if drift.is_far:
            self.prepared.module_factor *= drift.modules
            self.prepared.link_factor *= drift.links
        is_trusted = self.prepared.model.device.type == "cpu" or self._num_steps > _STEPS_OF_TRUST
        return drift.is_far and is_trusted

    def _ask(self, rows: RowsAhead, *, when: str) -> None:
        """Choose for these rows; change the mode if that saves more than it costs."""
        longest = max(rows.longest_tokens, self.engine.table.longest_len())
        self._chosen_for = rows = replace(rows, longest_tokens=longest)
        choice = self.prepared.choose(rows)
        if choice is None:
            return
        now = self._current_mode(choice)
        if now is not None and now.key == choice.best.key:
            self._choice, self._mode = choice, choice.to_text()
            return
        if now is not None and not self._pays(now, choice.best):
            return
        if self._change(choice):
            self._mode = self._logged(choice, rows, when=when)
        self._next_look = self._num_steps + _STEPS_OF_REST

    def _logged(self, choice: EngineChoice, rows: RowsAhead, *, when: str) -> str:
        """Log a choice and the reason, and return it as a sentence; `when` says for which rows."""
        _logger.info(
            "%s runs with %s; %s (%s: %d prompt and %d output tokens a row)",
            self.prepared.model.name,
            choice.reason,
            "; ".join(choice.notes()),
            when,
            rows.shape.prompt_tokens,
            rows.shape.output_tokens,
        )
        return choice.to_text()

    def _current_mode(self, choice: EngineChoice) -> ExecutionMode | None:
        """Return the current mode among the candidates of a choice; None if it is not one."""
        config = self.engine.runner.config
        key = bool(config.kv_offload), config.token_budget
        return next((mode for mode in choice.candidates if mode.key == key), None)

    def _pays(self, now: ExecutionMode, best: ExecutionMode) -> bool:
        inputs = self.prepared.inputs(self._chosen_for)
        assert inputs is not None, "a choice without inputs"
        num_bytes = self._leaving_bytes()
        if num_bytes > inputs.host_kv_bytes:
            return False
        copies = (inputs.costs.to_device, inputs.costs.to_host)
        change_s = sum(link.copy_s(num_bytes) for link in copies)
        return now.seconds - best.seconds > self._build_s + change_s

    def _leaving_bytes(self) -> int:
        """Return the KV bytes that a change copies."""
        return self.engine.moves.num_leaving_blocks() * self.prepared.block_bytes

    def _change(self, choice: EngineChoice) -> bool:
        """Rebuild the engine, or restore the previous one on failure; rows continue.

        Rows keep their KV if the host has memory for a copy.
        """
        before = self._choice
        has_memory = self._leaving_bytes() <= self.prepared.budget.host_kv_bytes
        states, unstarted, failed = self.engine.leave(with_kv=has_memory)
        self._left += failed
        self._note_past()
        del self.engine
        try:
            self.engine = self._built(choice)
            self._choice = choice
        except (ConfigError, CapacityError, RuntimeError, MemoryError) as error:
            self._warn(error, "as before")
            self._is_fixed = True
        if self._is_fixed:
            # outside the handler, whose error keeps a half-built engine alive
            self.engine = self._built(before)
        self._go_on(states, unstarted)
        return self._choice is choice

    def _note_past(self) -> None:
        """Accumulate the counters of an engine that ends."""
        stats = self.engine.stats()
        # except for those of layers, which outlive an engine
        num_failed = stats.num_failed_copies - self.engine.runner.weight_counters.num_failures
        self._past = summed(self._past, replace(stats, num_failed_copies=num_failed))

    def _make(self, runner: ModelRunner) -> Engine:
        engine = self._make_engine(runner)
        engine.on_scheduled = lambda: self.on_scheduled()
        for extension in self.extensions.values():
            extension.attach(runner)
        return engine

    def _built(self, choice: EngineChoice | None) -> Engine:
        gc.collect()  # free the previous engine's pool before the next one is allocated
        give_back_freed_memory(self.prepared.model.device)
        self._copied_s = 0.0
        return self._make(ModelRunner.of(self.prepared, choice))


# called once the model is loaded and before the pools exist
MakeExtension = Callable[[PhasedEngine], EngineExtension]


def _is_other(rows: RowsAhead, last: RowsAhead) -> bool:
    """Return whether the lengths of rows differ from those of the last choice."""
    pairs = [
        (rows.shape.prompt_tokens, last.shape.prompt_tokens),
        (rows.shape.output_tokens, last.shape.output_tokens),
    ]
    is_longer = rows.longest_tokens > max(last.longest_tokens, last.shape.prompt_tokens)
    return is_longer or any(max(a, b) > _OTHER_LENGTH * min(a, b) for a, b in pairs)


# latest rows that count: lengths may change along a plan
_NUM_SEEN = 4096
# finished rows needed to prefer generated lengths over bounds
_MIN_ENDED = 32


class RowsSeen:
    """Tracks the latest rows and estimates their computed prompt and output lengths.

    The output length of a row is the one its plan expects; else that of finished rows of the
    pool; else the most tokens it may generate. A prefix that a group shares counts once.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._prompts: deque[int] = deque(maxlen=_NUM_SEEN)
        self._shared: deque[int] = deque(maxlen=_NUM_SEEN)
        self._group_ids: deque[int] = deque(maxlen=_NUM_SEEN)
        self._outputs: deque[tuple[int, bool]] = deque(
            maxlen=_NUM_SEEN
        )  # and whether it is measured
        self._ended: deque[int] = deque(maxlen=_NUM_SEEN)
        # lengths of rows that finished elsewhere, sent with requests
        self._likely: deque[int] = deque(maxlen=_NUM_SEEN)
        # latest groups, in order
        self._groups: dict[int | None, None] = {}
        self._ids: dict[int | None, None] = {}
        self._max_lens: deque[int] = deque(maxlen=_NUM_SEEN)

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def add(self, requests: Iterable[Request]) -> int:
        """Add rows; return the longest length, prompt and output, that one of them may reach."""
        longest = 0
        for request in requests:
            num_prompt = len(request.prompt_token_ids)
            if not 0 < num_prompt < self._max_model_len:
                # invalid
                continue
            max_len = min(num_prompt + request.sampling.max_tokens, self._max_model_len)
            longest = max(longest, max_len)
            self._max_lens.append(max_len)
            if request.request_id in self._ids:
                # returned to the pool before, and here again
                continue
            _remember(self._ids, request.request_id)
            expected = expected_len(request, max_len)
            is_shared = request.group_id in self._groups
            if request.group_id is not None:
                _remember(self._groups, request.group_id)
                self._group_ids.append(request.group_id)
            self._shared.append(is_shared * request.prefix_len)
            self._prompts.append(max(1, num_prompt - self._shared[-1]))
            self._likely.extend(request.likely_output_lens)
            self._outputs.append(((expected or max_len) - num_prompt, expected is not None))
        return longest

    def note(self, completions: Collection[Completion]) -> None:
        self._ended.extend(max(1, len(c.token_ids)) for c in completions if not c.error)

    def ahead(self) -> RowsAhead:
        """Return the lengths to expect of the next rows, from those added last (at least one)."""
        outputs = [length for length, is_known in self._outputs if is_known]
        if not outputs:
            ended = self._ended if len(self._ended) >= _MIN_ENDED else self._likely
            outputs = list(ended or (n for n, _ in self._outputs))
        prompts, shared = np.array(self._prompts, float), np.array(self._shared, float)
        pairs = prompts * (shared + (prompts + 1) / 2)
        return RowsAhead.of(
            float(prompts.mean()),
            np.array(outputs, float),
            float(np.mean(outputs)),
            longest_tokens=max(self._max_lens),
            prompt_reads=float(pairs.sum() / prompts.sum()),
            shared_tokens=float(shared.mean()),
            group_rows=len(self._group_ids) / max(1, len(set(self._group_ids))) or 1.0,
        )


def _remember(latest: dict[int | None, None], key: int) -> None:
    """Mark a key as latest; drop the oldest one beyond the limit."""
    latest[key] = None
    if len(latest) > _NUM_SEEN:
        del latest[next(iter(latest))]
