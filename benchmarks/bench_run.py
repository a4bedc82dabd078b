"""Runs the parts of a suite: checks outputs, then measures the peers in turn, and logs results."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import job_data
import venvs
import workloads_e2e
from meters import wait_quiet
from peer_loop import Answer, PeerConfig, Settings, outcome
from peer_process import HERE, PeerError, PeerProcess
from runlog import Record, RunLog
from suites import BASELINE, REFERENCE, Part, Peer, PeerKind, rows_to_run, sample_rows
from summary import refusals
from venvs import ROOT, WORK
from workloads_e2e import Workload

DEMO_CHECKPOINT = ROOT / "raybatch" / "demo" / "checkpoint"
REFERENCE_PEER = Peer(
    name=REFERENCE, venv="transformers", script="peer_transformers.py", variant="reference"
)
NUM_REFERENCE_ROWS = 16
NUM_WARM_UP_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Runs parts of a suite with these settings; the log is its only state.

    Args:
        given_models: checkpoint folders of models that the command line named.
        folder: folder of this run: the log, the peers' own logs, the Parquet files of jobs.
        quiet_wait_s: most seconds to wait for a quiet machine before each repetition.
    """

    peers: tuple[Peer, ...]
    settings: Settings
    num_repetitions: int
    given_venvs: Mapping[str, Path]
    given_models: Mapping[str, Path]
    folder: Path
    log: RunLog
    quiet_wait_s: float

    def run(self, part: Part) -> None:
        """Run the missing measurements of one part."""
        part = sized_to_vocabulary(part, self.model_folder(part.model))
        kinds: tuple[PeerKind, ...] = ("engine", "job", "pool")
        peers = {kind: [peer for peer in self.peers if peer.kind == kind] for kind in kinds}
        for kind in kinds:
            for workload in part.workloads(kind):
                self._refer(part.model, workload, peers[kind])
        with self._fleet(part.model) as fleet:
            for workload in part.engine:
                self._measure_engines(fleet, part.model, workload, peers["engine"])
        for workload in part.job:
            self._measure_processes(part.model, workload, peers["job"], self._run_job)
        for workload in part.pool:
            self._measure_processes(part.model, workload, peers["pool"], self._run_pool)

    def model_folder(self, model: str) -> Path:
        """Return the checkpoint of a model: "demo", a given one, or made on demand."""
        if model == "demo":
            return DEMO_CHECKPOINT
        if model in self.given_models:
            return self.given_models[model]
        folder = WORK / "models" / model
        if not (folder / "tokenizer.json").exists():
            python = venvs.ensure("raybatch", self.given_venvs)
            command = [str(python), str(HERE / "models.py"), model, str(folder)]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return folder

    def _refer(self, model: str, workload: Workload, peers: Sequence[Peer]) -> None:
        """Log the reference tokens of sampled rows, which every raybatch run must match."""
        is_wanted = any(peer.name.startswith(BASELINE) for peer in peers)
        if not is_wanted or self.log.find("reference", model, workload.name, REFERENCE):
            return
        say(f"{model}, {workload.name}: reference tokens from transformers")
        rows = sample_rows(workload, NUM_REFERENCE_ROWS)
        try:
            with self.start(REFERENCE_PEER, model) as reference:
                reference.answer()
                answer = reference.run(workload, rows)
        except (PeerError, venvs.VenvError) as error:
            # without reference tokens every speed of this workload is refused
            self._log_failure(model, workload, REFERENCE_PEER, error)
            return
        self.log.add("reference", model, workload.name, REFERENCE, {"rows": rows, **answer})

    def _measure_engines(
        self, fleet: "Fleet", model: str, workload: Workload, peers: Sequence[Peer]
    ) -> None:
        missing = [p for p in peers if self._num_done(model, workload, p) < self.num_repetitions]
        for peer in missing:
            self._attempt(fleet, workload, peer, is_warm_up=True)
            reason = refusals(self.log).get((model, workload.name))
            if reason:
                say(f"{model}, {workload.name}: refused, {reason}")
                return
        for repetition in range(self.num_repetitions):
            for peer in missing:
                if self._num_done(model, workload, peer) <= repetition:
                    self._attempt(fleet, workload, peer, is_warm_up=False)

    def _attempt(self, fleet: "Fleet", workload: Workload, peer: Peer, *, is_warm_up: bool) -> None:
        """Run a peer once; a peer that fails is left out for the rest of the model."""
        if peer.process_name in fleet.failed:
            return
        try:
            process = fleet.get(peer)
            rows = rows_to_run(workload, peer)
            if is_warm_up:
                if not fleet.needs_warm_up(peer, workload):
                    return
                if peer.name != BASELINE:
                    rows = (rows or list(range(workload.num_requests)))[:NUM_WARM_UP_ROWS]
                answer = process.run(workload, rows, is_warm_up=True)
                values = {"rows": rows, **answer}
                self.log.add("warm_up", fleet.model, workload.name, peer.name, values)
                return
            is_quiet = wait_quiet(self.quiet_wait_s)
            answer = process.run(workload, rows)
        except (PeerError, venvs.VenvError) as error:
            fleet.failed.add(peer.process_name)
            self._log_failure(fleet.model, workload, peer, error)
            return
        self._log_measure(fleet.model, workload, peer, {**answer, "rows": rows, "quiet": is_quiet})

    def _measure_processes(
        self,
        model: str,
        workload: Workload,
        peers: Sequence[Peer],
        run: Callable[[str, Workload, Peer], Record],
    ) -> None:
        failed = set()
        for repetition in range(self.num_repetitions):
            for peer in peers:
                is_refused = (model, workload.name) in refusals(self.log)
                is_done = self._num_done(model, workload, peer) > repetition
                if is_refused or is_done or peer.name in failed:
                    continue
                is_quiet = wait_quiet(self.quiet_wait_s)
                try:
                    answer = run(model, workload, peer)
                except (PeerError, venvs.VenvError, job_data.JobOutputError) as error:
                    failed.add(peer.name)
                    self._log_failure(model, workload, peer, error)
                    continue
                self._log_measure(model, workload, peer, {**answer, "quiet": is_quiet})

    def _run_job(self, model: str, workload: Workload, peer: Peer) -> Record:
        requests = workloads_e2e.build(workload)
        files = self.folder / "job"
        shutil.rmtree(files, ignore_errors=True)
        job_data.write_input(requests, files / "in", rows_to_run(workload, peer))
        options = {
            "input": str(files / "in"),
            "output": str(files / "out"),
            "replicas": peer.replicas,
        }
        with self.start(peer, model, options) as process:
            answer, meter = process.finish(workload.num_requests)
        output = job_data.read_output(files / "out", len(requests))
        if output.window is not None:
            start, end = output.window
            answer["window_s"] = end - start
            answer["window_cpu_s"] = meter.cpu_s_between(start, end)
        counters = {} if output.cached_tokens is None else {"cached_tokens": output.cached_tokens}
        return answer | {
            "wall_s": meter.wall_s,
            "cpu_s": meter.cpu_s,
            "foreign_cores": meter.foreign_cores,
            **outcome(requests, Answer(token_ids=output.token_ids, counters=counters)),
        }

    def _run_pool(self, model: str, workload: Workload, peer: Peer) -> Record:
        # other tokens, so that blocks that the warm-up leaves in the prefix cache do not help
        other = dataclasses.replace(workload, seed=workload.seed + 1)
        with self.start(peer, model, {"replicas": peer.replicas}) as process:
            facts = process.answer()
            process.run(other, list(range(min(NUM_WARM_UP_ROWS, other.num_requests))))
            rows = rows_to_run(workload, peer)
            answer = process.run(workload, rows)
            engines = process.engine_memories()
        answer["cpu_s"] = answer["tree_cpu_s"]
        return answer | {
            "rows": rows,
            "versions": facts["versions"],
            "load_s": facts["load_s"],
            "engines": [dataclasses.asdict(engine) for engine in engines],
        }

    def _log_measure(self, model: str, workload: Workload, peer: Peer, answer: Record) -> None:
        number = self._num_done(model, workload, peer)
        self.log.add("measure", model, workload.name, peer.name, {"repetition": number, **answer})
        say(
            f"{model}, {workload.name}, {peer.name}, run {number + 1}: done, "
            f"foreign load {answer['foreign_cores']:.2f} cores"
        )

    def _log_failure(self, model: str, workload: Workload, peer: Peer, error: Exception) -> None:
        self.log.add("failure", model, workload.name, peer.name, {"why": str(error)})
        say(f"{model}, {workload.name}, {peer.name}: failed, {error}")

    def _num_done(self, model: str, workload: Workload, peer: Peer) -> int:
        return len(self.log.find("measure", model, workload.name, peer.name))

    @contextlib.contextmanager
    def _fleet(self, model: str) -> Iterator["Fleet"]:
        with contextlib.ExitStack() as stack:
            yield Fleet(bench=self, model=model, stack=stack)

    def start(
        self, peer: Peer, model: str, options: Mapping[str, Any] | None = None
    ) -> PeerProcess:
        """Start the process of a peer, which loads the model."""
        python = venvs.ensure(peer.venv, self.given_venvs)
        block_size = peer.block_size or self.settings.block_size
        config = PeerConfig(
            model=str(self.model_folder(model)),
            variant=peer.variant,
            settings=dataclasses.replace(self.settings, block_size=block_size),
            options=dict(options or {}),
        )
        return PeerProcess(peer, python, config, self.folder / f"{peer.process_name}.log")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The loaded engines of one model; each is started when it is first needed."""

    bench: Bench
    model: str
    stack: contextlib.ExitStack
    processes: dict[str, PeerProcess] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    warm: set[tuple[str, str]] = field(default_factory=set)

    def needs_warm_up(self, peer: Peer, workload: Workload) -> bool:
        """Return True at the first call for the peer's process and this workload."""
        key = (peer.process_name, workload.name)
        is_new = key not in self.warm
        self.warm.add(key)
        return is_new

    def get(self, peer: Peer) -> PeerProcess:
        """Return the process of a peer, with the model loaded."""
        name = peer.process_name
        if name not in self.processes:
            say(f"{self.model}: loading {name}")
            process = self.stack.enter_context(self.bench.start(peer, self.model))
            answer = process.answer()
            self.bench.log.add("load", self.model, "", name, answer)
            self.processes[name] = process
        return self.processes[name]


def sized_to_vocabulary(part: Part, folder: Path) -> Part:
    """Return the part with token ids that the model has."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return part.changed(lambda w: dataclasses.replace(w, vocab_size=config["vocab_size"]))


def say(line: str) -> None:
    """Print progress for the user to stderr; results go to stdout."""
    print(line, file=sys.stderr, flush=True)
