"""Where the running rows of a replica go that will end soon, as on a host that is taken away."""

import numpy as np

from raybatch.policy.pool.snapshot import PoolSnapshot, ReplicaSnapshot, RowMove
from raybatch.policy.pool.spread import MAX_MOVES


def leave_moves(pool: PoolSnapshot, source_id: int) -> tuple[RowMove, ...]:
    """Return moves of running rows to replicas that have room, rows with most to come first.

    Whether the pool ends sooner is no question here: what stays may be lost with its replica. A row
    goes with its KV where the other engine takes that, and each to the replica with most free
    sequences. At most `MAX_MOVES` of a replica are under way at once.
    """
    source = next((r for r in pool.replicas if r.replica_id == source_id), None)
    if source is None or source.rows is None:
        return ()
    others = [r for r in pool.replicas if r.replica_id != source_id]
    others = [r for r in others if r.can_give and not r.team_size]
    rooms = [_Room(r, source) for r in others]
    rows, moves = source.rows, list[RowMove]()
    (movable,) = np.nonzero(rows.can_move)
    for row in movable[np.lexsort((rows.ids[movable], -rows.left[movable]))].tolist():
        if source.num_moves + len(moves) >= MAX_MOVES:
            break
        tokens = int(rows.tokens[row])
        able = [room for room in rooms if room.fits(tokens)]
        if able:
            room = max(able, key=lambda room: (room.is_like, room.free_seqs, -room.replica_id))
            room.take(tokens)
            moves.append(RowMove(int(rows.ids[row]), source_id, room.replica_id, room.is_like))
    return tuple(moves)


class _Room:
    """What one replica can take while moves are chosen."""

    def __init__(self, replica: ReplicaSnapshot, source: ReplicaSnapshot) -> None:
        self.replica_id, self.is_like = replica.replica_id, replica.is_like(source)
        self.free_seqs, self._free_tokens = replica.free_seqs, replica.free_kv_tokens
        # one that has told nothing of its rows is not known to have room
        self._num_moves = MAX_MOVES - replica.num_moves if replica.rows is not None else 0

    def fits(self, tokens: int) -> bool:
        return min(self._num_moves, self.free_seqs) > 0 and tokens < self._free_tokens

    def take(self, tokens: int) -> None:
        self._num_moves -= 1
        self.free_seqs -= 1
        self._free_tokens -= tokens
