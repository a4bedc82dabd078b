"""Engines in TP groups: driver ranks in this process, worker ranks in others."""

import contextlib
import multiprocessing
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.phases import PhasedEngine
from raybatch.engine.sampling.sampler import Sampler
from raybatch.errors import RankError
from raybatch.models.config import read_model_spec
from raybatch_extensions.tp_groups.engine import TPExtension
from raybatch_extensions.tp_groups.group import GlooGroup, connect
from tests.engine.real_engines import NoStops
from tests.warm_processes import start_warm

BLOCK = 4
# timeouts of a group whose ranks all answer, and of one in which a rank will not
PATIENT_S, HASTY_S = 20.0, 0.7
_NUM_BLOCKS = 120


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault at one operation of a group, counted from 1; 0 is to connect."""

    at: int
    kind: str  # "leave", "hang", "die" or "damage"


class FaultyGroup:
    """A group with a fault at one operation."""

    def __init__(self, group, fault, timeout_s):
        self._group, self._fault, self._timeout_s, self._number = group, fault, timeout_s, 0
        self.kind = group.kind

    def sum_(self, x):
        self._count()
        self._group.sum_(x)

    def broadcast_(self, x):
        is_due = self._count()
        self._group.broadcast_(x)
        if is_due:
            # the last head, which rank 0 does not have
            x.view(torch.uint8)[-1] += 1

    def gather(self, x):
        self._count()
        return self._group.gather(x)

    def close(self):
        self._group.close()

    def _count(self):
        """Fail at the fault; return whether the data must be damaged."""
        self._number += 1
        if self._number != self._fault.at:
            return False
        fail(self._fault, self._timeout_s)
        return self._fault.kind == "damage"


def fail(fault, timeout_s):
    if fault.kind == "die":
        os._exit(9)
    if fault.kind == "hang":
        time.sleep(2 * timeout_s)
    if fault.kind in ("leave", "hang"):
        raise RankError(f"a fault at operation {fault.at}")


def faulty_connect(fault, by_gloo=False):
    """Return a `connect` for ranks that fails at `fault`."""

    def make(call, rendezvous, device):
        if fault is not None and not fault.at:
            fail(fault, call.timeout_s)
        group = GlooGroup(call, rendezvous) if by_gloo else connect(call, rendezvous, device)
        return group if fault is None else FaultyGroup(group, fault, call.timeout_s)

    return make


def make_engine(path, *, connect=connect, **options) -> PhasedEngine:
    block_bytes = BLOCK * kv_bytes_per_token(read_model_spec(path), torch.float32)
    config = EngineConfig(
        **(
            {
                "device": "cpu",
                "dtype": "float32",
                "block_size_tokens": BLOCK,
                "max_num_seqs": 8,
                "max_batched_tokens": 32,
                "kv_cache_bytes": _NUM_BLOCKS * block_bytes,
                "kv_offload": False,
                "host_kv_bytes": None,
                "speculative_tokens": 0,
            }
            | options
        )
    )
    prepared = PreparedModel.load(str(path), config)

    def engine(runner):
        sampler = Sampler(runner.spec.vocab_size, config.max_num_seqs, runner.spec.eos_token_ids)
        return Engine(runner, sampler, NoStops(), runner.config)

    return PhasedEngine(prepared, engine, [partial(TPExtension, connect=connect)])


def tp_groups_of(engine: PhasedEngine) -> TPExtension:
    return engine.extensions["tp_groups"]


class Workers:
    """Processes with engines as worker ranks; one that died is restarted when it is needed."""

    def __init__(self, count: int) -> None:
        self._places: list[Any] = [self._start() for _ in range(count)]

    def _start(self):
        ours, theirs = multiprocessing.Pipe()
        process = start_warm(_follow, theirs)
        theirs.close()
        return process, ours

    def pid(self, rank):
        return self._places[rank - 1][0].pid

    def send(self, calls, path, *, fault=None, by_gloo=False, **options):
        """Let one process join per call; only rank 1 has the fault."""
        for i, call in enumerate(calls):
            if not self._places[i][0].is_alive():
                self._places[i] = self._start()
            faults = (fault if i == 0 else None, by_gloo)
            self._places[i][1].send((path, call, faults, options))

    def wait_until_ready(self, count):
        """Wait until the first `count` processes have built the engines of their calls."""
        for _, pipe in self._places[:count]:
            assert pipe.recv() == "ready"

    def answers(self, count):
        """Return the result of each call: `Served`, an error text, or None if the process died."""
        found = []
        for process, pipe in self._places[:count]:
            try:
                found.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                process.join()
                found.append(None)
        return found

    def close(self):
        for process, pipe in self._places:
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()


def _follow(pipe) -> None:
    torch.set_num_threads(1)
    engines, faults = {}, {}

    def connect_now(call, rendezvous, device):
        return faulty_connect(*faults["now"])(call, rendezvous, device)

    while (task := pipe.recv()) is not None:
        path, call, faults["now"], options = task
        key = path, str(options)
        if key not in engines:
            engines[key] = make_engine(path, connect=connect_now, **options)
        pipe.send("ready")
        try:
            pipe.send(tp_groups_of(engines[key]).follow(call))
        except RankError as error:
            pipe.send(str(error))
