"""Simulates engines split by phase: some compute prompts, others decode with their KV.

The pool is as simple as possible: rows leave the queue in order, go to the engine with the fewest
rows among those with room, and stay on the engine where they decode.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from raybatch.actors.wire.records import Credit
from raybatch.records.arrays import Floats, Ints
from raybatch.records.types import ReplicaStats
from raybatch_lab.simulator.clock import VirtualClock
from raybatch_lab.simulator.engine import EngineSpec, MovedSequence
from raybatch_lab.simulator.links import Link, LinkSpec
from raybatch_lab.simulator.replica import SimulatedReplica
from raybatch_lab.simulator.rows import SimulatedRows

PROMPTS, OUTPUTS = 0, 1


class SplitPool:
    """Simulates one run of a job.

    Args:
        num_engines: engines for prompts, and engines for outputs.
        network: link through which KV leaves each engine for prompts. KV that has arrived waits
            for room without using memory of the engine.
    """

    def __init__(
        self,
        rows: SimulatedRows,
        engine: EngineSpec,
        num_engines: tuple[int, int],
        *,
        network: LinkSpec,
        message_s: float = 0.001,
    ) -> None:
        self.clock = VirtualClock()
        one: Ints = np.ones(len(rows), np.int64)
        # the first token comes with the prompt
        rows_of = replace(rows, output=one, max_tokens=one), rows
        self._phase_of = np.repeat([PROMPTS, OUTPUTS], num_engines).tolist()
        self.members = [
            SimulatedReplica(
                rank,
                rank,
                rows_of[phase],
                engine,
                self,
                self.clock,
                slowness=1.0,
                message_s=message_s,
            )
            for rank, phase in enumerate(self._phase_of)
        ]
        self._rows, self._kv_token_bytes = rows, engine.kv_bytes_per_token
        self._networks = [Link(network) for _ in range(num_engines[PROMPTS])]
        self._message_s = message_s
        self._waiting = deque[int](range(len(rows))), deque[int]()
        self._credits: dict[int, Credit] = {}
        self._num_held: Ints = np.zeros(len(self.members), np.int64)
        # seconds at which the end of each row was reported
        self.ended_s: Floats = np.full(len(rows), np.nan)
        self._num_left = len(rows)

    def run(self) -> float:
        """Run the job to its end; return the seconds."""
        for member in self.members:
            member.start()
        self.clock.run(lambda: not self._num_left)
        return self.clock.now

    def pull(self, replica_id: int, room: Credit) -> None:
        self._credits[replica_id] = room
        # dispatch after all replicas that pull at this time
        self.clock.after(0.0, self._dispatch)

    def report(self, replica_id: int, rows: Sequence[int], _: ReplicaStats) -> None:
        self._num_held[replica_id] -= len(rows)
        for row in rows:
            if self._phase_of[replica_id] == OUTPUTS or self._rows.output[row] == 1:
                self.ended_s[row] = self.clock.now
                self._num_left -= 1
            else:
                num_bytes = self._rows.prompt[row] * self._kv_token_bytes
                at_s = self._networks[replica_id].arrival(self.clock.now, num_bytes)
                self.clock.at(at_s, partial(self._arrive, row))

    def _arrive(self, row: int) -> None:
        self._waiting[OUTPUTS].append(row)
        self._dispatch()

    def _dispatch(self) -> None:
        given: dict[int, list[int]] = {}
        for phase, waiting in enumerate(self._waiting):
            room = {r: p for r, p in self._credits.items() if self._phase_of[r] == phase}
            while waiting and room:
                rank = min(room, key=self._num_held.__getitem__)
                row = waiting.popleft()
                given.setdefault(rank, []).append(row)
                self._num_held[rank] += 1
                tokens = room[rank].tokens - int(self._rows.prompt[row])
                room[rank] = Credit(tokens=tokens, rows=room[rank].rows - 1)
                if min(tokens, room[rank].rows) <= 0:
                    del room[rank]
        for rank, rows in given.items():
            del self._credits[rank]
            begun = self._begun(rows) if self._phase_of[rank] == OUTPUTS else []
            self.clock.after(self._message_s, partial(self.members[rank].submit, rows, begun))

    def _begun(self, rows: Sequence[int]) -> list[MovedSequence]:
        return [MovedSequence(row, 1, int(self._rows.prompt[row])) for row in rows]
