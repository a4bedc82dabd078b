"""What one replica runs, in rows and in cost; kept by the queue."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class ReplicaLoad:
    """Sums over the rows that a replica runs, those of dropped batches included.

    Args:
        num_rows: that it runs.
        cost: of these rows.
        is_testing: it runs suspects or a control, and nothing else.
        has_control: it runs the control.
        aborting: rows and cost of dropped batches.
    """

    num_rows: int = 0
    cost: int = 0
    is_testing: bool = False
    has_control: bool = False
    aborting: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, num_rows: int, cost: int) -> None:
        """Note rows that it got."""
        self.num_rows += num_rows
        self.cost += cost

    def remove(self, num_rows: int, cost: int) -> None:
        """Note rows that it runs no more."""
        self.num_rows -= num_rows
        self.cost -= cost
        self.has_control &= self.num_rows > 0

    def abort(self, batch_id: int, num_rows: int, cost: int) -> None:
        """Note a dropped batch, whose rows it runs until `confirm`."""
        self.aborting[batch_id] = (num_rows, cost)

    def confirm(self, batch_id: int) -> None:
        """Note that it runs no row of a dropped batch any more."""
        self.remove(*self.aborting.pop(batch_id, (0, 0)))
