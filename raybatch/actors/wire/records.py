"""Frozen records that travel between pool handle, coordinator and replicas."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.prefix.block_keys import BlockKeys
from raybatch.records.types import Capacity, RowProgress, Sampling, TokenLengths

AnswerStatus = Literal["pending", "done", "failed", "unknown"]
# of `Backend.extensions`, for an extension of the pool
EnginePart = Literal["teams", "sharing"]
# what a replica is asked to do about a row that moves, a method of `MovingRows`
MoveStep = Literal["peek", "reserve", "receive", "depart", "arrive", "begin", "stay", "release"]
Activity = Literal["nothing", "fetching", "steps", "endpoint"]
# a table of `columns.REQUEST_SCHEMA`, and what its column `sampling` points into
Requests = tuple[pa.Table, tuple[Sampling, ...]]
# request id = batch id << ROW_BITS | row
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
# wide enough that two different rows never have one key
TWIN_KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """What one pool runs; equal specs in one Ray job share a pool."""

    model: str
    backend: BackendConfig
    engine: EngineConfig
    pool: PoolConfig


def digest_of(spec: PoolSpec) -> str:
    """Return what names a pool among others of one process; equal specs have the same."""
    text = json.dumps(asdict(spec), sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Span(NamedTuple):
    """Rows `start` to `stop` (exclusive) of one row batch."""

    batch_id: int
    start: int
    stop: int


class RowCrashes(NamedTuple):
    """How many engines died with a row; one that is given up is answered with an error."""

    row: int
    num_crashes: int
    is_given_up: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What the death of a replica cost.

    Args:
        num_rows: that it was running, those of dropped row batches included.
        crashes: of each row batch, the rows that somebody still waits for.
        was_control: it was running a control row, see `raybatch.actors.queue.probation`.
    """

    num_rows: int
    crashes: Mapping[int, Sequence[RowCrashes]] = field(default_factory=dict)
    was_control: bool = False

    def given_up(self) -> list[tuple[int, RowCrashes]]:
        """Return the rows that ended the replica while they ran alone, each with its batch."""
        rows = ((batch_id, row) for batch_id, crashes in self.crashes.items() for row in crashes)
        return [(batch_id, row) for batch_id, row in rows if row.is_given_up]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowGroups:
    """The prefix group of each row of a row batch, or of some of its rows.

    Args:
        group_ids: int64 [rows], below 0 for a row that is alone.
        prefix_lens: int32 [rows], tokens that the row's group shares; 0 for a row that is alone.
    """

    group_ids: npt.NDArray[np.int64]
    prefix_lens: npt.NDArray[np.int32]

    def between(self, start: int, stop: int) -> "RowGroups":
        ids, prefix_lens = self.group_ids[start:stop], self.prefix_lens[start:stop]
        return RowGroups(group_ids=ids, prefix_lens=prefix_lens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LikelyLengths:
    """Output lengths that are likely for some rows, as the pool has learnt them.

    Args:
        kinds: int32 [rows], places in `lengths`.
        lengths: each ascending, of an equal share of the rows of a kind; () where none is known.
    """

    kinds: npt.NDArray[np.int32]
    lengths: tuple[TokenLengths, ...]

    def between(self, start: int, stop: int) -> list[TokenLengths]:
        return [self.lengths[kind] for kind in self.kinds[start:stop].tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One row batch as a feeder hands it over.

    Args:
        token: chosen by the feeder, unique; it names the batch in later calls.
        name: of these rows among those of the client. A feeder that takes
            the place of another names them alike, and gets what is finished. "" has no heir.
        refs: one object reference to the pair (request table, samplings), which the coordinator
            owns; in a list, so that Ray passes the reference and not the object.
        max_new_tokens: int64 [rows], upper bound of generated tokens over all samples.
        expected_new_tokens: int64 [rows], what is expected of them; None expects the upper bound.
        num_samples: int32 [rows], of each row; None where each has one.
        copies: int32 [rows], further rows that each row's answer is for; None where there are none.
        twin_keys: `TWIN_KEY_BYTES` of each row, one after the other: rows with equal keys have
            equal results. Zeros are of a row that runs by itself; empty where all do.
        groups: of planned rows; ids that no other client's groups have.
        block_keys: of rows without a plan, from which the pool makes groups by itself.
        begun: tokens of rows that earlier runs did not finish, see `raybatch.actors.wire.begun`.
    """

    token: str
    client: str
    name: str = ""
    refs: list[Any] = field(default_factory=list)
    prompt_tokens: npt.NDArray[np.int32]
    max_new_tokens: npt.NDArray[np.int64]
    expected_new_tokens: npt.NDArray[np.int64] | None = None
    num_samples: npt.NDArray[np.int32] | None = None
    copies: npt.NDArray[np.int32] | None = None
    twin_keys: bytes = b""
    groups: RowGroups | None = None
    block_keys: BlockKeys | None = None
    crashes: npt.NDArray[np.int16] | None = None
    begun: pa.RecordBatch | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The coordinator's answer about a row batch.

    Args:
        status: "pending" asks again, "unknown" submits again, "failed" carries rank and cause.
        results: record batches of the result schema, in order of arrival.
        attempts: int16 [rows], how often each row was handed to a replica.
        begun: tokens that unfinished rows have gained since the last answer.
    """

    status: AnswerStatus
    results: tuple[pa.RecordBatch, ...] = ()
    attempts: npt.NDArray[np.int16] | None = None
    rank: int = 0
    cause: str = ""
    crashes: tuple[RowCrashes, ...] = ()
    begun: pa.RecordBatch | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Rows of one row batch for one replica.

    Args:
        places: of each span among all spans of the same pull; None where this is the only batch.
        groups: of the rows of all spans, one after another; None takes those of the table.
        begun: tokens with which some of the rows begin; None where all begin with none.
        likely: of the rows of all spans, one after another; None where nothing is known.
    """

    batch_id: int
    refs: list[Any]
    spans: tuple[Span, ...]
    places: tuple[int, ...] | None = None
    groups: RowGroups | None = None
    begun: pa.RecordBatch | None = None
    likely: LikelyLengths | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedStart:
    """Why an engine could not be built.

    Args:
        cause: as text of one line, because exceptions of an engine need not survive pickling.
        is_final: whether another start would fail in the same way, as options do.
        trace: of an error that is not this library's own; else "".
    """

    cause: str
    is_final: bool = False
    trace: str = ""


class Place(NamedTuple):
    """Where a replica runs: its process, its host for the user and for Ray; "" without Ray.

    Others reach it at its address.
    """

    pid: int
    host: str = ""
    host_id: str = ""
    address: str = "127.0.0.1"


class Pulse(NamedTuple):
    """What one replica is busy with: "nothing", "fetching" its rows, "steps" or an "endpoint".

    The steps are those that its engine has finished.
    """

    num_steps: int = 0
    busy_with: Activity = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Progress:
    """What one replica decodes, and what it has room for beside that."""

    rows: RowProgress
    capacity: Capacity


class Piece(NamedTuple):
    """Copies of whole blocks of a row that goes on; without any, `refs` is empty."""

    refs: list[Any]
    # block at which the next copy begins
    next_block: int
    # whole blocks behind it
    num_missing: int
    num_bytes: int


class LeftRow(NamedTuple):
    """A row that has stopped at a replica: a reference to its states, and its tokens so far."""

    refs: list[Any]
    begun: pa.RecordBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much more one replica wants, in rows and in prompt tokens that it would compute.

    The prefix of a group counts once, and not at all where the replica holds it.
    """

    tokens: int
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolState:
    """What a pool holds at this moment, over all clients; for tests and debugging."""

    num_batches: int
    num_waiting_rows: int
    num_held_rows: int
    num_results: int
    coordinator_pid: int
    pids: tuple[int, ...]
    finished_by_pid: dict[int, int]
