"""A small job on the fake backend, and its expected output."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from faultlab.drivers import Driver, wait_until
from raybatch.durable.audit import audit
from raybatch.durable.commit import joined_ranges
from raybatch.durable.layout import DATA, DONE, SUCCESS, UNITS
from raybatch.durable.storage import Store, open_store
from raybatch.errors import RaybatchError
from raybatch.outputs.verify import verify
from raybatch.planning.store import read_all_units, read_plans
from raybatch.report.history import read_history

NUM_ROWS = 720
NUM_UNITS = 40
# of a row
MAX_TOKENS = 32
# of some units
JOINED_BYTES = 20_000
# `plan.max_driver_bytes` of a large job
_LARGE_BYTES = 16_000
# longer than engines are stopped that go on
STUCK_AFTER_S = 8.0
_NUM_FILES = 3
_POLL_S = 0.2

Answers = Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Counts of an output, by its audit and by its rows.

    Args:
        wrong: rows whose text is not that of a run without faults.
        is_clean: the audit found nothing, and `_SUCCESS` exists.
        is_verified: `raybatch verify --deep` calls the output complete.
    """

    expected: int
    written: int
    lost: int
    duplicated: int
    wrong: int
    is_clean: bool
    is_verified: bool

    @property
    def is_right(self) -> bool:
        """Return whether every row occurs once, with its text."""
        is_whole = self.is_clean and self.is_verified
        return is_whole and not (self.lost or self.duplicated or self.wrong)


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A folder with a job in it.

    Args:
        folder: short, because Ray keeps sockets below it.
        sink: of the job; None is a folder below.
        source: of the job; None is a folder below.
        max_num_seqs: rows that an engine answers at once.
        step_s: of the engines; a row takes 1 to `MAX_TOKENS` steps, each as often.
        output_file_bytes: of the job; None keeps a file per unit.
        is_large: the job is planned by Ray tasks, while its first rows run.
        publish: table to which the job adds its rows; these are the rows that are checked.
        executor: of the job.
        module: that runs it.
        stage: options of the stage in place of its usual ones.
        fake: further options of the fake engines.
    """

    folder: Path
    sink: str | None = None
    source: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    num_rows: int = NUM_ROWS
    unit_rows: int = NUM_ROWS // NUM_UNITS
    replicas: int = 2
    max_num_seqs: int = 16
    step_s: float = 0.01
    flush_every_s: float = 0.3
    partition_by: tuple[str, ...] = ()
    output_file_bytes: int | None = None
    is_large: bool = False
    publish: str | None = None
    executor: str = "ray"
    module: str = "faultlab.driver"
    stage: Mapping[str, Any] = field(default_factory=dict)
    fake: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sink_uri(self) -> str:
        """Return where the output goes."""
        return self.sink or str(self.folder / "out")

    @property
    def source_uri(self) -> str:
        """Return where the input lies."""
        return self.source or str(self.folder / "in")

    def prepare(self) -> None:
        """Write source and job file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = range(self.num_rows)
        rows = pa.table(
            {
                # neighbours share a beginning, so that there is something to plan
                "prompt": [f"chapter {i // 24}: question {i} of many" for i in numbers],
                "number": pa.array(numbers),
                "third": [i % 3 for i in numbers],
            }
        )
        fs, root = fsspec.core.url_to_fs(self.source_uri)
        fs.makedirs(root, exist_ok=True)
        file_rows = -(-self.num_rows // _NUM_FILES)
        for first in range(0, self.num_rows, file_rows):
            with fs.open(f"{root}/{first:04d}.parquet", "wb") as file:
                pq.write_table(rows.slice(first, file_rows), file)
        self.write_job()

    def write_job(self) -> None:
        """Write the job file, also in place of one with other options."""
        self.job_file.write_text(json.dumps(self._job()))

    @property
    def job_file(self) -> Path:
        """Return the path of the job file; JSON is YAML."""
        return self.folder / "job.yaml"

    def start(self, *, name: str = "a", fault: str | None = None) -> Driver:
        """Start a driver with its own Ray cluster, or in the one that the variables name.

        Args:
            name: of its folder; two drivers at once need two.
            fault: point where its processes die.
        """
        variables = {**os.environ, **self.variables}
        variables.pop("RAYBATCH_FAULT", None)
        if "RAY_ADDRESS" not in self.variables:
            variables.pop("RAY_ADDRESS", None)
        if fault is not None:
            variables["RAYBATCH_FAULT"] = fault
        return Driver.start(self.job_file, self.folder / name, variables, module=self.module)

    def finish(self, *, timeout_s: float = 400.0) -> tuple[int, float]:
        """Run the job to its end; return the exit code and the seconds of the whole process."""
        began = time.monotonic()
        driver = self.start()
        try:
            wait_until(lambda: False, driver, timeout_s=timeout_s, poll_s=_POLL_S)
        finally:
            driver.kill_tree()
        return driver.process.returncode, time.monotonic() - began

    def store(self) -> Store:
        """Return the store of the sink."""
        return open_store(self.sink_uri)

    def num_parts(self) -> int:
        """Return how many units are committed."""
        fs, root = fsspec.core.url_to_fs(self._units_uri)
        fs.invalidate_cache()
        try:
            is_cut = self.partition_by and self.output_file_bytes is None
            num_parts = len(fs.ls(f"{root}/{DONE if is_cut else DATA}", detail=False))
        except OSError:
            num_parts = 0
        if self.output_file_bytes is None:
            return num_parts
        return num_parts + sum(map(len, joined_ranges(open_store(self._units_uri))))

    @property
    def _units_uri(self) -> str:
        """Return the output that has a part per unit, and the logs of runs."""
        return self.sink_uri if self.output_file_bytes is None else f"{self.sink_uri}/{UNITS}"

    def num_generated(self) -> int:
        """Return how many rows engines have finished, those of every run."""
        path = self.folder / "finished"
        return path.stat().st_size if path.exists() else 0

    def num_redone(self) -> int:
        """Return how many rows engines have finished again."""
        return max(0, self.num_generated() - self.num_rows)

    def num_late_units(self) -> int:
        """Return how often a driver came to commit an existing unit, by the logs.

        A zombie, a second driver or a task that Ray ran again had been faster. What a killed run
        had not logged is not counted.
        """
        return sum(run.units_found for run in read_history(open_store(self._units_uri)).runs)

    def answers(self) -> Answers:
        """Return the text of every row of the output."""
        table = self._rows()
        return dict(
            zip(table["number"].to_pylist(), table["generated_text"].to_pylist(), strict=True)
        )

    def num_errors(self) -> int:
        """Return how many rows of the output have no text."""
        return sum(text is None for text in self.answers().values())

    def check(self, expected: Answers) -> Checked:
        """Compare the output with its plan and with that of a run without faults."""
        store = self.store()
        try:
            units = read_all_units(self.sink_uri, read_plans(self.sink_uri))
            is_clean = audit(store, units).is_clean
            is_verified = verify(self.sink_uri, deep=True).is_complete
            rows = self._rows()
        except (RaybatchError, pa.ArrowInvalid):
            return self._unreadable()
        numbers, texts = rows["number"].to_pylist(), rows["generated_text"].to_pylist()
        num_ids = pc.count_distinct(rows["row_id"]).as_py()
        pairs = zip(numbers, texts, strict=True)
        return Checked(
            expected=self.num_rows,
            written=len(numbers),
            lost=len(set(range(self.num_rows)) - set(numbers)),
            duplicated=len(numbers) - min(len(set(numbers)), num_ids),
            wrong=sum(expected.get(number) != text for number, text in pairs),
            is_clean=is_clean and store.size(SUCCESS) is not None,
            is_verified=is_verified,
        )

    def _unreadable(self) -> Checked:
        return Checked(
            expected=self.num_rows,
            written=0,
            lost=self.num_rows,
            duplicated=0,
            wrong=0,
            is_clean=False,
            is_verified=False,
        )

    def _rows(self) -> pa.Table:
        store = self.store()
        if self.publish is not None:
            # its distribution may be missing where no job has a table
            from raybatch_tables.address import Address

            parts = [Address.parse(self.publish).table().open(None)[1].read_all()]
        else:
            names = store.names(DATA)
            parts = [pq.read_table(pa.BufferReader(store.read(name))) for name in names]
        return pa.concat_tables(
            part.select(["number", "row_id", "generated_text"]) for part in parts
        )

    def _job(self) -> dict[str, Any]:
        options = {
            "step_s": self.step_s,
            "max_num_seqs": self.max_num_seqs,
            "lengths": "hash",
            "finished_log": str(self.folder / "finished"),
            "hang_dir": str(self.folder),
            **self.fake,
        }
        return {
            "source": self.source_uri,
            "sink": self.sink_uri,
            "executor": self.executor,
            "flush_every_s": self.flush_every_s,
            "partition_by": list(self.partition_by),
            "output_file_bytes": self.output_file_bytes,
            "publish": self.publish,
            "plan": {
                "unit_rows": self.unit_rows,
                "max_unit_rows": self.unit_rows,
                **({"max_driver_bytes": _LARGE_BYTES} if self.is_large else {}),
            },
            "stage": {
                "model": "demo",
                "prompt": "{prompt}",
                "sampling": {"max_tokens": MAX_TOKENS},
                "pool": {"replicas": self.replicas, "stuck_after_s": STUCK_AFTER_S},
                "backend": {"kind": "fake", "options": options},
                **self.stage,
            },
        }
