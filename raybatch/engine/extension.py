"""Interface of optional mechanisms of an engine, which `installed_extensions` loads."""

from raybatch.engine.loading.runner import ModelRunner
from raybatch.errors import RankError
from raybatch.records.types import Capacity, ReplicaStats


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
