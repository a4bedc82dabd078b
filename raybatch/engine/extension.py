"""The door of an engine for mechanisms that only some jobs ask for; see `raybatch.engine.ext`."""

from raybatch.engine.loading.runner import ModelRunner
from raybatch.errors import TeamError
from raybatch.records.types import Capacity, ReplicaStats


class EngineExtension:
    """A mechanism of an engine that only some jobs ask for: a folder of `raybatch.engine.ext`.

    Where weights lie it says while they are loaded (`PlaceWeights`). It sets what a block of a
    layer runs (`Decoder.ffn_service`), what runs a pass (`ModelRunner.passes`), and where KV lies
    (`ModelRunner.blocks`), for as long as these are to be other than the core's. What is here does
    nothing; methods of its own are steps that an extension of the pool takes by name, and what
    raises TeamError there leaves the engine to go on alone.

    Attributes:
        name: of the folder.
        is_in_rounds: whether others may wait for passes of this engine while it has no rows.
        keeps_engine: whether the engine is not to be built anew now for another way to run.
    """

    name: str

    @property
    def is_in_rounds(self) -> bool:
        return False

    @property
    def keeps_engine(self) -> bool:
        return False

    def attach(self, runner: ModelRunner) -> None:
        """Take note of what computes from now on, where an engine was built, or built anew."""

    def note_rows(self) -> None:
        """Do what is due once rows have ended or left."""

    def serve(self) -> None:
        """Run a pass without rows where another engine waits for it."""

    def lose(self, error: TeamError) -> None:
        """End what is done with others, as one is gone; rows are computed again."""

    def capacity(self, found: Capacity) -> Capacity:
        """Return a capacity with what there is of it."""
        return found

    def stats(self, found: ReplicaStats) -> ReplicaStats:
        """Return counters with its own."""
        return found

    def close(self) -> None:
        """End what runs in the background; the engine is not used again."""
