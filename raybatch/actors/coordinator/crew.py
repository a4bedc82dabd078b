"""Lets the number of replicas follow the work that is left: as `plan_crew` decides; no Ray."""

import logging

import numpy as np

from raybatch.actors.coordinator.parts import PoolParts
from raybatch.policy.pool.crew import USUAL_START_S, CrewOptions, CrewSnapshot, CrewWork, plan_crew
from raybatch.policy.pool.rates import StepSeconds
from raybatch.policy.pool.snapshot import ReplicaSnapshot

# rows that have come for some time come no more after this share of it without any
_FED_PAUSE = 0.25

_logger = logging.getLogger(__name__)


class Crew:
    """Follows one pool whose number of replicas may change; another one it leaves as it is."""

    def __init__(self, parts: PoolParts) -> None:
        self._num_first, self._num_most = parts.plan.num_first, parts.plan.num_replicas
        self._parts, self._replicas = parts, parts.replicas
        self._queue, self._view = parts.queue, parts.view
        self._idle_since: dict[int, float] = {}
        self._fed_since: float | None = None
        self._fed_until = 0.0

    def note_rows(self, now: float) -> None:
        """Note that rows have come."""
        if self._fed_since is None:
            self._fed_since = now
        self._fed_until = now

    def note_rest(self) -> None:
        """Note that no rows are there."""
        self._fed_since = None

    def look(self, now: float) -> None:
        """Want more replicas or fewer; those to stop get no rows from here on."""
        ledger = self._replicas.ledger
        num_most = self._num_most - ledger.num_retired()
        if self._num_first is None or num_most < 1:
            return
        options = CrewOptions(min_replicas=min(self._num_first, num_most), max_replicas=num_most)
        plan = plan_crew(self._snapshot(now), options)
        if plan.num_starts:
            ledger.grow(plan.num_starts)
            _logger.info("%d more engines start: %s", plan.num_starts, plan.reason)
        for replica_id in plan.stops:
            member = self._replicas.members[replica_id]
            member.is_leaving = True
            ledger.release(member.rank)
            if self._idle_since.pop(replica_id, None) is None:
                member.started.end()
            _logger.info("%s stops: %s", member, plan.reason)
            self._parts.let_go(replica_id)

    def _snapshot(self, now: float) -> CrewSnapshot:
        members, ledger = self._replicas.members, self._replicas.ledger
        held = {r: self._queue.load(r).num_rows for r, m in members.items() if m.is_ready}
        idle = [
            r
            for r, num_rows in held.items()
            if not num_rows
            and members[r].takes_rows
            and not self._view.num_moves(r)
            and r in self._parts.pulls
        ]
        self._idle_since = {r: self._idle_since.get(r, now) for r in idle}
        num_replicas = len(ledger.to_start())
        staying = [m for m in members.values() if m.stays]
        in_sight = self._view.snapshot(staying, (), with_rows=True).replicas
        known = [r for r in in_sight if r.rows is not None and r.seconds is not None]
        unplaced = [r for r, m in members.items() if m.pid is None and not m.is_leaving]
        has_learnt = any(m.num_finished_rows for m in members.values())
        return CrewSnapshot(
            num_replicas=num_replicas,
            num_starting=num_replicas - ledger.num_working(),
            unplaced=tuple(unplaced),
            idle_s={r: now - since for r, since in self._idle_since.items()},
            has_waiting=self._queue.has_waiting(),
            is_at_work=any(held.values()),
            work=self._work(known) if known and has_learnt else None,
            fed_s=self._fed_s(now),
            seconds=_mean_seconds(known) if known else None,
            num_slots=_mean_slots(known) if known else 1.0,
            start_s=ledger.longest_start_s or USUAL_START_S,
        )

    def _fed_s(self, now: float) -> float:
        if self._fed_since is None:
            return 0.0
        fed_s = self._fed_until - self._fed_since
        return fed_s if now - self._fed_until <= _FED_PAUSE * fed_s else 0.0

    def _work(self, known: list[ReplicaSnapshot]) -> CrewWork:
        waiting = self._queue.tokens_left(is_held=False)
        held = self._queue.tokens_left(is_held=True)
        left = np.concatenate([r.rows.left for r in known if r.rows is not None])
        # rows that run have their prompts; of some nothing is heard yet, and they count as waiting
        unstarted = max(0, held.num_rows - len(left)) / max(1, held.num_rows)
        # those that wait for a row like them in no line never run
        in_line = self._queue.num_waiting() / max(1, waiting.num_rows)
        return CrewWork(
            num_rows=in_line * waiting.num_rows + unstarted * held.num_rows + len(left),
            prompt_tokens=in_line * waiting.prompt + unstarted * held.prompt,
            output_tokens=in_line * waiting.output + unstarted * held.output + float(left.sum()),
            longest=float(left.max(initial=0.0)),
        )


def _mean_seconds(known: list[ReplicaSnapshot]) -> StepSeconds:
    seconds = [r.seconds for r in known if r.seconds is not None]
    return StepSeconds(*np.mean(np.array(seconds), axis=0).tolist())


def _mean_slots(known: list[ReplicaSnapshot]) -> float:
    """Return how many rows a replica runs at once, by its sequences and its memory for KV."""
    slots = []
    for replica in known:
        assert replica.rows is not None, "a replica that tells its rows"
        num_rows, ends = len(replica.rows), replica.rows.tokens + replica.rows.left
        num_tokens = replica.free_kv_tokens + replica.rows.tokens.sum()
        in_memory = num_tokens / ends.mean() if num_rows else np.inf
        # prompts that are shared take less
        slots.append(max(1.0, num_rows, min(num_rows + replica.free_seqs, in_memory)))
    return float(np.mean(slots))
