"""Frozen records that travel between pool handle, coordinator and replicas, and their calls.

A call starts at once, even if its result is never awaited; arguments are positional. A remote
object is a `CallHandle`, or the handle of a Ray actor.
"""

import hashlib
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.prefix.block_keys import BlockKeys
from raybatch.records.pool_stats import PoolStats
from raybatch.records.share import ShareRank
from raybatch.records.types import Capacity, ReplicaStats, RowProgress, Sampling, TokenLengths

AnswerStatus = Literal["pending", "done", "failed", "unknown"]
# keys of `Backend.extensions`
EnginePart = Literal["tp_groups", "sharing"]
# methods of `MovingRows`
MoveStep = Literal["peek", "reserve", "receive", "depart", "arrive", "begin", "stay", "release"]
# what a replica does: fetches rows, runs steps, or waits for an endpoint
Activity = Literal["nothing", "fetching", "steps", "endpoint"]
# a table of `columns.REQUEST_SCHEMA`, and the samplings that its column `sampling` indexes
Requests = tuple[pa.Table, tuple[Sampling, ...]]
# request id = batch id << ROW_BITS | row
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
# wide enough that two different rows never have one key
DEDUP_KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """The configuration of one pool; equal specs in one Ray job share a pool."""

    model: str
    backend: BackendConfig
    engine: EngineConfig
    pool: PoolConfig


def digest_of(spec: PoolSpec) -> str:
    """Return a key of a pool within a process: a digest of its spec."""
    text = json.dumps(asdict(spec), sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RowRange(NamedTuple):
    """Rows `start` to `stop` (exclusive) of one row batch."""

    batch_id: int
    start: int
    stop: int


class RowCrashes(NamedTuple):
    """How often a row has crashed an engine; a row that is given up is answered with an error."""

    row: int
    num_crashes: int
    is_given_up: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The rows affected by the death of a replica.

    Args:
        num_rows: number of rows that it held, including those of dropped row batches.
        crashes: crash counts of these rows by row batch, without dropped batches.
        was_canary: it ran a canary row, see `raybatch.actors.queue.quarantine`.
    """

    num_rows: int
    crashes: Mapping[int, Sequence[RowCrashes]] = field(default_factory=dict)
    was_canary: bool = False

    def given_up(self) -> list[tuple[int, RowCrashes]]:
        """Return (batch id, crashes) of each row given up, as it crashed engines while alone."""
        rows = ((batch_id, row) for batch_id, crashes in self.crashes.items() for row in crashes)
        return [(batch_id, row) for batch_id, row in rows if row.is_given_up]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowGroups:
    """The prefix group of each row of a row batch, or of some of its rows.

    Args:
        group_ids: int64 [rows], below 0 for a row without a group.
        prefix_lens: int32 [rows], prefix tokens of the row's group; 0 without a group.
    """

    group_ids: npt.NDArray[np.int64]
    prefix_lens: npt.NDArray[np.int32]

    def between(self, start: int, stop: int) -> "RowGroups":
        ids, prefix_lens = self.group_ids[start:stop], self.prefix_lens[start:stop]
        return RowGroups(group_ids=ids, prefix_lens=prefix_lens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LikelyLengths:
    """Likely output lengths of some rows, as the pool has learnt them.

    Args:
        kinds: kind of each row, int32 [rows]: its index into `lengths`.
        lengths: output lengths of each kind as evenly spaced quantiles, ascending; () if unknown.
    """

    kinds: npt.NDArray[np.int32]
    lengths: tuple[TokenLengths, ...]

    def between(self, start: int, stop: int) -> list[TokenLengths]:
        return [self.lengths[kind] for kind in self.kinds[start:stop].tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One row batch as a feeder submits it.

    Args:
        token: unique id of the submission, chosen by the feeder and used in later calls.
        name: name of the row batch, unique within the client. A feeder that replaces a dead one
            submits the same name, and gets the finished rows. "" for a batch without a name.
        refs: one object reference to the pair (request table, samplings), owned by the
            coordinator; in a list, so that Ray passes the reference and not the object.
        max_new_tokens: int64 [rows], most tokens that a row may generate, over all samples.
        expected_new_tokens: int64 [rows], tokens that it should generate; None for the most.
        num_samples: int32 [rows]; None if each row has one.
        copies: int32 [rows], number of identical rows outside the table that get the same answer,
            and are counted with it; None if there are none.
        dedup_keys: `DEDUP_KEY_BYTES` of each row, one after the other: rows with equal keys have
            equal results. Zeros mark a row without dedup; empty if all are.
        groups: prefix groups of rows with a plan; their ids are unique among clients.
        block_keys: hashes of rows without a plan, from which the pool forms groups.
        crashes: int16 [rows], how often each row crashed an engine in earlier runs; None if never.
        checkpointed: tokens of rows that earlier runs did not finish; see `CheckpointedTokens`.
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
    dedup_keys: bytes = b""
    groups: RowGroups | None = None
    block_keys: BlockKeys | None = None
    crashes: npt.NDArray[np.int16] | None = None
    checkpointed: pa.RecordBatch | None = None


class ResultBatches(tuple[pa.RecordBatch, ...]):
    """Record batches of one schema, pickled as Arrow messages.

    Ray pickles a record batch column by column, which takes 30 times as long for a few rows.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        if not self:
            return ResultBatches, ()
        schema = self[0].schema.serialize().to_pybytes()
        return _read_batches, (schema, [batch.serialize().to_pybytes() for batch in self])


def _read_batches(schema: bytes, messages: list[bytes]) -> ResultBatches:
    known = _read_schema(schema)
    return ResultBatches(pa.ipc.read_record_batch(pa.py_buffer(m), known) for m in messages)


@lru_cache(maxsize=8)
def _read_schema(schema: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(schema))


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The coordinator's answer about a row batch.

    Args:
        status: "done"; "pending": ask again; "unknown": submit again; "failed": the pool has
            failed, see `rank` and `cause`.
        results: record batches of the result schema, in order of arrival.
        attempts: int16 [rows], how often each row was assigned to a replica.
        crashes: new crash counts of rows since the last answer.
        checkpointed: new tokens of unfinished rows since the last answer.
    """

    status: AnswerStatus
    results: ResultBatches = field(default_factory=ResultBatches)
    attempts: npt.NDArray[np.int16] | None = None
    rank: int = 0
    cause: str = ""
    crashes: tuple[RowCrashes, ...] = ()
    checkpointed: pa.RecordBatch | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Rows of one row batch for one replica.

    Args:
        refs: reference to the request table of the batch, see `Submission`.
        row_ranges: the rows, in the order in which to run them.
        places: position of each row range among those of all assignments of the pull, in order;
            None if there is only this assignment.
        groups: groups of the rows of all ranges, in order; None uses those in the table.
        checkpointed: tokens from which some rows resume; None if none do.
        likely: likely output lengths of the rows of all ranges, in order; None if unknown.
    """

    batch_id: int
    refs: list[Any]
    row_ranges: tuple[RowRange, ...]
    places: tuple[int, ...] | None = None
    groups: RowGroups | None = None
    checkpointed: pa.RecordBatch | None = None
    likely: LikelyLengths | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedStart:
    """Why an engine could not be built.

    Args:
        cause: one line of text, because exceptions of an engine may not be picklable.
        is_final: another start would fail in the same way, such as for wrong options.
        trace: traceback of an error from outside this library; else "".
    """

    cause: str
    is_final: bool = False
    trace: str = ""


class Place(NamedTuple):
    """Where a replica runs: process id, name and Ray id of its host, and its IP address.

    Name and id of the host are "" without Ray. Other replicas connect to the address.
    """

    pid: int
    host: str = ""
    host_id: str = ""
    address: str = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Progress:
    """The progress of a replica's decoding rows, and its capacity."""

    rows: RowProgress
    capacity: Capacity


class Piece(NamedTuple):
    """Copies of whole KV blocks of a running row; `refs` is empty if there are none."""

    refs: list[Any]
    # first block of the next copy
    next_block: int
    # whole blocks from there on
    num_missing: int
    num_bytes: int


class LeftRow(NamedTuple):
    """A row that has left a replica: a reference to its states, and its tokens so far."""

    refs: list[Any]
    checkpointed: pa.RecordBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """How many rows, and prompt tokens to compute, a replica asks for when it pulls.

    The prefix of a group counts once, and not at all if the replica has it.
    """

    tokens: int
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolState:
    """Current contents of a pool, over all clients; for tests and debugging."""

    num_batches: int
    num_waiting_rows: int
    num_held_rows: int
    num_results: int
    coordinator_pid: int
    pids: tuple[int, ...]
    finished_by_pid: dict[int, int]


class PoolApi(Protocol):
    """The calls that a coordinator answers: of feeders, replicas and other pools.

    See `Coordinator` and `PoolHandle` for their meaning.
    """

    def start(self) -> Awaitable[None]: ...
    def has_failed(self) -> Awaitable[bool]: ...
    def generate(self, submission: Submission, requests: Requests, /) -> Awaitable[Answer]: ...
    def collect(self, token: str, /) -> Awaitable[Answer]: ...
    def cancel(self, token: str, /) -> Awaitable[None]: ...
    def partial_results(
        self, client: str, seen: Mapping[str, int], /
    ) -> Awaitable[list[Answer]]: ...
    def has_named(self, client: str, name: str, /) -> Awaitable[bool]: ...
    def forget(self, client: str, names: Sequence[str], /) -> Awaitable[None]: ...
    def note_outside(
        self, client: str, num_rows: int, errors: dict[str, int], /
    ) -> Awaitable[None]: ...
    def note_unit(
        self, client: str, unit: int, state: str, host: str, pid: int, /
    ) -> Awaitable[None]: ...
    def stop(self, client: str, /) -> Awaitable[None]: ...
    def is_stopped(self, client: str, /) -> Awaitable[bool]: ...
    def stats(self, client: str, /) -> Awaitable[PoolStats]: ...
    def state(self) -> Awaitable[PoolState]: ...
    def rest(self) -> Awaitable[None]: ...
    def make_room(self) -> Awaitable[bool]: ...
    def shutdown(self) -> Awaitable[None]: ...
    def pull(self, replica_id: int, credit: Credit, /) -> Awaitable[list[Assignment] | None]: ...
    def report(
        self,
        replica_id: int,
        batch_ids: Sequence[int],
        results: ResultBatches,
        stats: ReplicaStats,
        busy_with: Activity,
        progress: Progress | None = None,
        /,
    ) -> Awaitable[float]: ...
    def note_checkpointed(
        self, progress: list[tuple[int, pa.RecordBatch]], /
    ) -> Awaitable[None]: ...
    def note_lost(self, batch_id: int, /) -> Awaitable[None]: ...
    def note_cause(
        self, replica_id: int, cause: str, ends_run: bool = False, trace: str = "", /
    ) -> Awaitable[None]: ...
    def drain(self, replica_id: int, why: str, /) -> Awaitable[None]: ...
    def exchange(self, replica_id: int, text: str, /) -> Awaitable[list[str] | None]: ...


class ReplicaApi(Protocol):
    """The calls that a replica answers, all of its coordinator; see `Replica`."""

    def place(self) -> Awaitable[Place]: ...
    def start(
        self, num_engines_on_host: int, share_rank: ShareRank | None, coordinator: PoolApi, /
    ) -> Awaitable[FailedStart | None]: ...
    def run(self, coordinator: PoolApi, /) -> Awaitable[None]: ...
    def give_back(
        self, max_rows: int | None = None, max_cost: int | None = None, /
    ) -> Awaitable[list[tuple[int, int]]]: ...
    def drain(self) -> Awaitable[list[tuple[int, int]]]: ...
    def abort(self, batch_id: int, /) -> Awaitable[None]: ...
    def abort_row(self, request_id: int, /) -> Awaitable[None]: ...
    def move(self, step: MoveStep, /, *args: object) -> Awaitable[Any]: ...
    def extend(self, part: EnginePart, step: str, /, *args: object) -> Awaitable[Any]: ...
