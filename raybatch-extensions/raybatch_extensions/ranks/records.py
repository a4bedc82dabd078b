"""Messages between the coordinator and the engines of a TP group."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInit:
    """The address of the driver of a TP group and the rank of one member; rank 0 is the driver.

    Args:
        generation: number of the group; a driver uses each only once.
        host, port: address of the driver's store, through which ranks connect.
        timeout_s: how long a rank waits for another one before the group ends.
    """

    generation: int
    rank: int
    size: int
    host: str
    port: int
    timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FormingCost:
    """Bytes and seconds of forming a TP group; those of weight slices are maxima over ranks."""

    group: str  # transport between ranks
    slice_bytes: int
    slice_s: float
    kv_bytes: int
    kv_s: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The work of a worker rank: its steps, or none if the TP group was not formed."""

    is_committed: bool
    num_steps: int
