"""An engine that is asked again how it runs, and built anew where another way ends sooner."""

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from raybatch.engine.engine import Engine
from raybatch.engine.extension import EngineExtension
from raybatch.engine.loading.loaded_model import give_back_freed_memory
from raybatch.engine.loading.prepared import PreparedModel, log_choice
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.profile.layer_bench import step_clock
from raybatch.engine.row_moves import RowMoves
from raybatch.engine.rows_seen import RowsSeen
from raybatch.engine.step import summed
from raybatch.errors import CapacityError, ConfigError, TeamError, error_text
from raybatch.policy.choose_engine import EngineChoice, EngineWay, step_drift
from raybatch.policy.cost.layers import RowsAhead, RowShape
from raybatch.records.types import Capacity, Completion, ReplicaStats, Request, SequenceState

# steps between two looks at how it goes, and after a change
_STEPS_OF_LOOK, _STEPS_OF_REST = 64, 512
# steps on a GPU before costs that were corrected may change how an engine runs
_STEPS_OF_TRUST = 10_000
# rows of another length than those that were chosen for
_OTHER_LENGTH = 1.25
# drafts of the last rows, where no option says how many
_TAIL_DRAFTS, _TAIL_ROWS = 4, 32
_logger = logging.getLogger(__name__)


class PhasedEngine:
    """An `Engine` to its callers; asks `choose_engine` again, and is built anew. Of one thread.

    It asks with its first rows, with a row that the present way would end, when the last ones
    decode, and when steps take other times than forecast. What runs goes on, with its KV where host
    memory holds copies of that; no answer depends on it.

    Args:
        make: an engine for a runner, which has the options that were chosen.
        extensions: mechanisms that the options of this job ask for.
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
        self._asked = prepared.usual_rows()
        self._choice = prepared.choose(self._asked)
        self._way = prepared.budget.plain_reason()
        if self._choice is None:
            _logger.info("%s runs with %s", prepared.model.name, self._way)
        else:
            self._way = self._told(self._choice, self._asked, when="of usual length")
        self._had_waiting = self._is_fixed = self._drafts_tail = False
        began = time.perf_counter()
        # the one that runs now
        self.engine = self._first_engine()
        self._build_s = time.perf_counter() - began
        self._num_steps, self._next_look, self._num_dry_looks = 0, _STEPS_OF_LOOK, 0
        self._seconds = self._copied_s = 0.0
        self._looked_at = self.engine.stats()

    def _first_engine(self) -> Engine:
        """Build what was chosen, or, where the host does not give that, what needs no choice."""
        try:
            return self._built(self._choice)
        except (ConfigError, RuntimeError, MemoryError) as error:
            if self._choice is None or not self._choice.best.kv_offload:
                raise
            self._warn(error, "with KV on the device")
        self._choice, self._is_fixed = None, True
        self._way = "KV on the device, as host memory for KV could not be had"
        return self._built(None)

    def _warn(self, error: Exception, how: str) -> None:
        name = self.prepared.model.name
        text = "%s runs %s, as the way that was chosen could not be built: %s"
        _logger.warning(text, name, how, error_text(error))

    @property
    def runner(self) -> ModelRunner:
        return self.engine.runner

    @property
    def moves(self) -> RowMoves:
        """Return that of the engine now; what was on its way into one before is computed again."""
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
        except TeamError as error:
            made = []
            self.go_on_alone(error)
        completions, self._left = [*self._left, *made], []
        self._note_rows()
        self._seconds += self._clock() - began
        self._num_steps += 1
        self._seen.note(completions)
        if self._num_steps >= self._next_look:
            self._next_look = self._num_steps + _STEPS_OF_LOOK
            self._look()
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

    def begun(self, min_new_tokens: int) -> list[SequenceState]:
        return self.engine.begun(min_new_tokens)

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

    def go_on_alone(self, error: TeamError) -> None:
        """Run rows in an engine of their own after another one was lost that computed with it."""
        states, unstarted, ended = self.engine.leave(with_kv=False)
        for extension in self.extensions.values():
            extension.lose(error)
        self._left += ended
        self._note_past()
        self.engine = self._make(self.engine.runner)
        self._drafts_tail = False
        self._go_on(states, unstarted)

    def _go_on(self, states: Sequence[SequenceState], unstarted: Sequence[Request]) -> None:
        """Let an engine that was built anew have the rows of the one before."""
        self.engine.restore(states)
        self.engine.add(unstarted)
        self._looked_at, self._seconds = self.engine.stats(), 0.0

    def stats(self) -> ReplicaStats:
        stats = replace(summed(self._past, self.engine.stats()), way=self._way)
        for extension in self.extensions.values():
            stats = extension.stats(stats)
        return stats

    @property
    def _may_choose(self) -> bool:
        is_kept = any(extension.keeps_engine for extension in self.extensions.values())
        return self.prepared.budget.may_choose and not self._is_fixed and not is_kept

    def _expect(self, requests: Sequence[Request]) -> None:
        """Choose for the first rows that come, and for one that the present way would end."""
        longest = self._seen.add(requests)
        # what is kept of rows that move would be lost with the pool
        if not self._may_choose or not self._seen or not self.engine.moves.is_idle:
            return
        # the last token has no KV
        is_longer = longest > max(self.engine.row_tokens + 1, self._asked.longest_tokens)
        is_idle = not self.engine.num_unfinished()
        # what rows are like takes longer than a look at both
        if not is_longer and not is_idle:
            return
        rows = self._seen.ahead()
        if is_idle and _is_other(rows, self._asked):
            self._ask(rows, when="of the first rows")
        elif is_longer:
            self._ask(rows, when="of a longer row")

    def _look(self) -> None:
        """Look at steps since the last look, and at what is left."""
        stats, seconds, copied_s = self.engine.stats(), self._seconds, self._copied_s
        before, self._looked_at, self._seconds = self._looked_at, stats, 0.0
        self._copied_s = self.engine.runner.window_counters.copy_s
        self._had_waiting |= bool(stats.num_waiting)
        # one look may fall between two pulls
        self._num_dry_looks = 0 if stats.num_waiting else self._num_dry_looks + 1
        is_tail = self._had_waiting and self._num_dry_looks > 1 and stats.num_running > 0
        if stats.num_waiting and self._drafts_tail:
            self.engine.end_drafts()
            self._drafts_tail = False
        if is_tail and self._begins_drafts(stats.num_running):
            return
        if self._choice is None or not self._may_choose:
            return
        was_tail = self._asked.num_rows is not None
        if is_tail:
            if self._choice.best.kv_offload:
                self._ask(self._last_rows(), when="of the last rows")
        elif was_tail and stats.num_waiting:
            self._ask(self._seen.ahead(), when="of rows that came after all")
        elif not was_tail and self._has_drifted(
            self._choice.best, before, stats, seconds, self._copied_s - copied_s
        ):
            self._ask(self._seen.ahead(), when="as steps take other times than forecast")

    def _begins_drafts(self, num_running: int) -> bool:
        """Begin to guess tokens where few enough rows decode, once; return whether it did."""
        config, runner = self.prepared.config, self.engine.runner
        if self._drafts_tail or config.speculative_tokens != "auto":
            return False
        # drafts take blocks by the clock, which must not decide who is rounded
        if config.host_kv_dtype != "auto" or self.prepared.model.device.type != "cpu":
            return False
        most = _TAIL_ROWS if self._choice is None else self._choice.draft_rows
        if runner.num_window_blocks or num_running > most:
            return False
        self._drafts_tail = self.engine.begin_drafts(_TAIL_DRAFTS)
        return self._drafts_tail

    def _last_rows(self) -> RowsAhead:
        """Return the rows that run, with what is left of them; shared blocks count once."""
        table = self.engine.table
        tokens, left = table.running_lengths()
        num_shared, group_rows = table.users.shared_reads()
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
        self, way: EngineWay, before: ReplicaStats, now: ReplicaStats, seconds: float, copy_s: float
    ) -> bool:
        """Correct costs where the steps between took other times; return whether to ask again."""
        facts = self.prepared.facts(self._asked)
        if facts is None:
            return False
        drift = step_drift(facts, way, before, now, seconds=seconds, copy_s=copy_s)
        # costs that were off have shown nothing of any way
        budget = self.prepared.budget
        known = frozenset() if drift.is_far else budget.proven | {way.key}
        self.prepared.budget = replace(budget, proven=known)
        if drift.is_far:
            self.prepared.module_factor *= drift.modules
            self.prepared.link_factor *= drift.links
        is_trusted = self.prepared.model.device.type == "cpu" or self._num_steps > _STEPS_OF_TRUST
        return drift.is_far and is_trusted

    def _ask(self, rows: RowsAhead, *, when: str) -> None:
        """Choose for these rows, and change where that saves more than it costs."""
        longest = max(rows.longest_tokens, self.engine.table.longest_len())
        self._asked = rows = replace(rows, longest_tokens=longest)
        choice = self.prepared.choose(rows)
        if choice is None:
            return
        now = self._present_way(choice)
        if now is not None and _is_alike(now, choice.best):
            self._choice, self._way = choice, choice.to_text()
            return
        if now is not None and not self._pays(now, choice.best):
            return
        if self._change(choice):
            self._way = self._told(choice, rows, when=when)
        self._next_look = self._num_steps + _STEPS_OF_REST

    def _told(self, choice: EngineChoice, rows: RowsAhead, *, when: str) -> str:
        """Log a choice, and return it as a sentence."""
        log_choice(self.prepared.model.name, choice, rows, when=when)
        return choice.to_text()

    def _present_way(self, choice: EngineChoice) -> EngineWay | None:
        """Return what a choice says of the way that the engine runs now; None where it cannot."""
        config = self.engine.runner.config
        for way in choice.ways:
            is_place = way.kv_offload == bool(config.kv_offload)
            if is_place and way.max_batched_tokens == config.token_budget:
                return way
        return None

    def _pays(self, now: EngineWay, best: EngineWay) -> bool:
        facts = self.prepared.facts(self._asked)
        assert facts is not None, "a choice without facts"
        num_bytes = self._leaving_bytes()
        if num_bytes > facts.host_kv_bytes:
            return False
        copies = (facts.costs.to_device, facts.costs.to_host)
        change_s = sum(link.copy_s(num_bytes) for link in copies)
        return now.seconds - best.seconds > self._build_s + change_s

    def _leaving_bytes(self) -> int:
        """Return the bytes of copies of KV that a change makes."""
        return self.engine.moves.num_leaving_blocks() * self.prepared.block_bytes

    def _change(self, choice: EngineChoice) -> bool:
        """Build the engine anew, or as it was; what runs goes on, nothing is lost.

        It does so with its KV, unless the host has no memory for copies of that.
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
            # behind the handler, whose error holds what was built so far
            self.engine = self._built(before)
        self._go_on(states, unstarted)
        return self._choice is choice

    def _note_past(self) -> None:
        """Keep the counters of an engine that ends."""
        stats = self.engine.stats()
        # without those of layers, which outlive an engine and go on counting
        num_failed = stats.num_failed_copies - self.engine.runner.weight_counters.num_failures
        self._past = summed(self._past, replace(stats, num_failed_copies=num_failed))

    def _make(self, runner: ModelRunner) -> Engine:
        engine = self._make_engine(runner)
        engine.on_scheduled = lambda: self.on_scheduled()
        for extension in self.extensions.values():
            extension.attach(runner)
        return engine

    def _built(self, choice: EngineChoice | None) -> Engine:
        gc.collect()  # of the engine before, whose pool would be there beside the next one
        give_back_freed_memory(self.prepared.model.device)
        self._copied_s = 0.0
        return self._make(ModelRunner.of(self.prepared, choice))


# of an engine, once its model is in place and before it has pools
MakeExtension = Callable[[PhasedEngine], EngineExtension]


def _is_other(rows: RowsAhead, asked: RowsAhead) -> bool:
    """Return whether rows are of other lengths than those that were asked for."""
    pairs = [
        (rows.shape.prompt_tokens, asked.shape.prompt_tokens),
        (rows.shape.output_tokens, asked.shape.output_tokens),
    ]
    is_longer = rows.longest_tokens > max(asked.longest_tokens, asked.shape.prompt_tokens)
    return is_longer or any(max(a, b) > _OTHER_LENGTH * min(a, b) for a, b in pairs)


def _is_alike(way: EngineWay, other: EngineWay) -> bool:
    """Return whether an engine runs in the same way by both."""
    sizes = (way.max_batched_tokens, other.max_batched_tokens)
    return way.kv_offload == other.kv_offload and sizes[0] == sizes[1]
