"""What earlier runs of a unit know of its rows, and where this run keeps what it learns."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.wire.begun import Begun
from raybatch.actors.wire.columns import crash_error
from raybatch.actors.wire.records import RowCrashes
from raybatch.durable.journal import PLACE, Strikes
from raybatch.stages.unit_writer import UnitWriter


class UnitWatch:
    """Follows one unit.

    Args:
        begun: tokens of rows that they did not finish, by position.
    """

    def __init__(self, writer: UnitWriter, unit: int, strikes: Strikes, begun: Begun) -> None:
        begun.take_new()
        self._writer = writer
        self.unit = unit
        self.strikes = strikes
        self.begun = begun

    @classmethod
    def read(cls, writer: UnitWriter, unit: int) -> "UnitWatch":
        """Read what earlier runs have kept of a unit below the sink."""
        return cls(writer, unit, writer.strikes_of(unit), writer.begun_of(unit))

    def at(self, positions: npt.NDArray[np.int64]) -> "PlacedWatch":
        """Return what is known of some rows of the unit."""
        return PlacedWatch(unit=self, positions=positions)

    async def note(self, strikes: Strikes) -> None:
        """Keep deaths for later runs."""
        self.strikes |= strikes
        await asyncio.to_thread(self._writer.keep_strikes, self.unit, strikes)

    async def flush(self) -> None:
        """Keep the tokens that rows have gained since the last time."""
        tokens = self.begun.take_new()
        if tokens is not None:
            await asyncio.to_thread(self._writer.keep_begun, self.unit, tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacedWatch:
    """Follows some rows of a unit, as a pool wants it.

    Args:
        positions: int64 [rows], in the unit.
    """

    unit: UnitWatch
    positions: npt.NDArray[np.int64]

    def take(self, rows: Sequence[int]) -> "PlacedWatch":
        """Return the same for some of these rows."""
        return self.unit.at(self.positions[np.asarray(rows, np.intp)])

    def given_up(self) -> dict[int, str]:
        """Return the rows that are not tried any more, each with its error."""
        known = self.unit.strikes
        places = enumerate(self.positions.tolist())
        return {row: crash_error(known.crashes[p]) for row, p in places if p in known.given_up}

    @property
    def crashes(self) -> npt.NDArray[np.int16]:
        known = self.unit.strikes.crashes
        return np.array([known.get(pos, 0) for pos in self.positions.tolist()], np.int16)

    @property
    def begun(self) -> pa.RecordBatch | None:
        row_at = {pos: row for row, pos in enumerate(self.positions.tolist())}
        known = self.unit.begun.of(row_at.keys())
        if known is None:
            return None
        return _with_rows(known, [row_at[pos] for pos in known.column(PLACE).to_pylist()])

    async def note_crashes(self, crashes: Sequence[RowCrashes]) -> None:
        places = {int(self.positions[one.row]): one for one in crashes}
        given_up = frozenset(pos for pos, one in places.items() if one.is_given_up)
        counts = {pos: one.num_crashes for pos, one in places.items()}
        await self.unit.note(Strikes(crashes=counts, given_up=given_up))

    def note_begun(self, begun: pa.RecordBatch) -> None:
        self.unit.begun.add(_with_rows(begun, self.positions[begun.column(PLACE).to_numpy()]))


def _with_rows(
    batch: pa.RecordBatch, rows: Sequence[int] | npt.NDArray[np.int64]
) -> pa.RecordBatch:
    place = batch.schema.get_field_index(PLACE)
    return batch.set_column(place, batch.schema.field(place), pa.array(rows, pa.int32()))
