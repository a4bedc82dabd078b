"""A sequence whose KV lives in host memory, as a record."""

from dataclasses import dataclass, field

from raybatch.engine.sequences.table import Sequence
from raybatch.policy.boundary.records import Status


@dataclass(kw_only=True, slots=True, eq=False)
class StoredSequence:
    """A sequence of an engine whose KV lives in host memory.

    Args:
        record: of the sequence; its arrival is its id.
        status: as `raybatch.policy.boundary.records.SequencePages` has it.
        host_blocks: that it holds, in order of position.
        num_stored: tokens whose KV is in them.
        slot: where it runs, if it does.
        waited: boundaries since it came into its status.
        num_failures: times in a row that its KV did not come back.
    """

    record: Sequence
    status: Status
    host_blocks: list[int] = field(default_factory=list)
    num_stored: int = 0
    slot: int | None = None
    waited: int = 0
    num_failures: int = 0

    @property
    def id(self) -> int:
        """The same for as long as the engine has the sequence."""
        return self.record.arrival
