"""Looks whether the rows of a stored plan are as they were written."""

import numpy as np

from raybatch.durable.storage import store_of
from raybatch.durable.units import row_sums
from raybatch.errors import ConfigError
from raybatch.planning.store import read_shards, read_units, shard_name
from raybatch.planning.stored import StoredPlan

# the last bytes of an Arrow file: one that was cut lacks them
_MAGIC = b"ARROW1"


def damage_of(sink: str, stored: StoredPlan, *, is_deep: bool) -> str | None:
    """Return what is wrong with the shards of a plan, and the way out; None where nothing is.

    Args:
        sink: of the job.
        stored: the plan.
        is_deep: read all rows and compare the sums of units, not the end of each file alone.
    """
    if not (is_deep and stored.shards):
        return _damaged_end(sink, stored)
    units = read_units(sink, stored)
    sums = np.zeros(units.num_units, np.uint64)
    ends = [*(first for _, first in stored.shards[1:]), stored.num_rows]
    for (_, first), end in zip(stored.shards, ends, strict=True):
        try:
            shard = read_shards(sink, stored, first, end)
        except ConfigError as error:
            return str(error)
        sums += row_sums(shard.column("unit").to_numpy(), np.arange(first, end), units.num_units)
    if not np.array_equal(sums, units.row_sums):
        number = stored.first_unit + int(np.argmax(sums != units.row_sums))
        folder = shard_name(stored, "").rstrip("/")
        return _told(f"{sink.rstrip('/')}/{folder} has other rows in unit {number} than planned")
    return None


def _damaged_end(sink: str, stored: StoredPlan) -> str | None:
    store = store_of(sink)
    for name, _ in stored.shards:
        path = shard_name(stored, name)
        try:
            is_whole = store.tail(path, len(_MAGIC)) == _MAGIC
        except FileNotFoundError:
            return _told(f"{store.uri}/{path} is gone")
        if not is_whole:
            return _told(f"{store.uri}/{path} was cut")
    return None


def _told(what: str) -> str:
    return (
        f"{what}, and without it the output cannot be gone on with; bring it back from a copy, or "
        "choose another folder"
    )
