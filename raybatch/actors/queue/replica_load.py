"""What one replica runs, in rows, in cost and in prefix groups; kept by the queue."""

from dataclasses import dataclass, field

from raybatch.actors.queue.row_states import Share


@dataclass(slots=True)
class _HeldGroup:
    prefix_len: int
    num_rows: int


@dataclass(slots=True)
class ReplicaLoad:
    """Sums over the rows that a replica runs, those of dropped batches included.

    Args:
        num_rows: that it runs.
        cost: of these rows, and of the prefix of each of their groups, once.
        is_testing: it runs suspects or a control, and nothing else.
        has_control: it runs the control.
        aborting: what dropped batches weigh.
    """

    num_rows: int = 0
    cost: int = 0
    is_testing: bool = False
    has_control: bool = False
    aborting: dict[int, Share] = field(default_factory=dict)
    _groups: dict[int, _HeldGroup] = field(default_factory=dict)

    def holds(self, group: int) -> bool:
        """Return whether it runs rows of a group, so that it has the prefix."""
        return group in self._groups

    def groups(self) -> list[int]:
        """Return the groups of its rows."""
        return list(self._groups)

    def add(self, share: Share) -> list[tuple[int, int]]:
        """Note rows that it got; return the groups that it had no rows of, and their prefixes."""
        self.num_rows += share.num_rows
        self.cost += share.cost
        started = []
        for group, prefix_len, num_rows in share.groups:
            if group not in self._groups:
                self._groups[group] = _HeldGroup(prefix_len, 0)
                self.cost += prefix_len
                started.append((group, prefix_len))
            self._groups[group].num_rows += num_rows
        return started

    def remove(self, share: Share) -> list[int]:
        """Note rows that it runs no more; return the groups that it has no rows of from now on."""
        self.num_rows -= share.num_rows
        self.cost -= share.cost
        ended = []
        for group, _, num_rows in share.groups:
            held = self._groups[group]
            held.num_rows -= num_rows
            if not held.num_rows:
                self.cost -= held.prefix_len
                del self._groups[group]
                ended.append(group)
        self.has_control &= self.num_rows > 0
        return ended

    def abort(self, batch_id: int, share: Share) -> None:
        """Note a dropped batch, whose rows it runs until `confirm`."""
        self.aborting[batch_id] = share

    def confirm(self, batch_id: int) -> list[int]:
        """Note that it runs no row of a dropped batch any more; return what `remove` does."""
        return self.remove(self.aborting.pop(batch_id, Share(0, 0)))
