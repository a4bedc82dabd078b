"""Frozen records that travel between pool handle, coordinator and replicas."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.config import BackendConfig, EngineConfig, PoolConfig

AnswerStatus = Literal["pending", "done", "failed", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """What one pool runs; equal specs in one Ray job share a pool.

    Args:
        model: checkpoint directory, hub id or URI.
        backend: which backend the replicas run.
        engine: options of each engine.
        pool: replicas, their resources and the limits of failure.
    """

    model: str
    backend: BackendConfig
    engine: EngineConfig
    pool: PoolConfig


class Span(NamedTuple):
    """Rows `start` to `stop` (exclusive) of one row batch."""

    batch_id: int
    start: int
    stop: int


class PoisonRow(NamedTuple):
    """A row that ended its replica while it ran alone, `num_crashes` deaths in all."""

    batch_id: int
    row: int
    num_crashes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What the death of a replica cost.

    Args:
        num_rows: that it was running, those of dropped row batches included.
        num_struck: of them, rows that somebody still waits for.
        poison: rows that are given up.
        was_control: it was running a control row, see `raybatch.actors.trials`.
    """

    num_rows: int
    num_struck: int
    poison: tuple[PoisonRow, ...] = ()
    was_control: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One row batch as a feeder hands it over.

    Args:
        token: chosen by the feeder, unique; it names the batch in later calls.
        client: the stage that asks, for the counters.
        refs: one object reference to the pair (request table, samplings); in a list, so that
            Ray passes the reference and not the object.
        prompt_tokens: int32 [rows].
        max_new_tokens: int64 [rows], upper bound of generated tokens over all samples.
    """

    token: str
    client: str
    refs: list[Any]
    prompt_tokens: npt.NDArray[np.int32]
    max_new_tokens: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the coordinator says about a row batch.

    Args:
        status: "pending" asks again, "unknown" submits again, "failed" carries rank and cause.
        results: record batches of the result schema, in order of arrival.
        attempts: int16 [rows], how often each row was handed to a replica.
        rank: replica that failed.
        cause: of the failure.
    """

    status: AnswerStatus
    results: tuple[pa.RecordBatch, ...] = ()
    attempts: npt.NDArray[np.int16] | None = None
    rank: int = 0
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Rows of one row batch for one replica; `refs` as in `Submission`."""

    batch_id: int
    refs: list[Any]
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much more one replica wants, in prompt tokens and in rows."""

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
