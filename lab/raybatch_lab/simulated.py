"""The report of `raybatch bench simulate`: figures of simulated pools with error bounds."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.backends.cost_cache import load_cost_model
from raybatch.durable.storage import error_context, store_of
from raybatch.errors import ConfigError
from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import duration, full, percent
from raybatch.records.arrays import Ints
from raybatch_lab.simulator.engine import EngineSpec
from raybatch_lab.simulator.events import PoolSpec
from raybatch_lab.simulator.figures import Ideal, PoolFigures, ideal_of, simulate
from raybatch_lab.simulator.rows import SimulatedRows
from raybatch_lab.simulator.validation import Validation, read_validation


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """Results of simulated pools of several sizes, and the errors of such simulations.

    Args:
        workload: name that the user gave.
        seed: seed of the lengths of its rows.
        ideal: lower bounds of the seconds of any pool.
        figures: results of each pool.
        validation: errors of simulations of this engine, by held-out runs.
    """

    workload: str
    seed: int
    num_rows: int
    ideal: Ideal
    figures: tuple[PoolFigures, ...]
    validation: Validation

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"is_simulated": True}, indent=1)

    def to_text(self) -> str:
        found = self.validation
        error = f"+-{percent(found.completion_error)}"
        rows = tuple(
            (
                full(each.num_replicas),
                f"{duration(each.completion_s)} {error}",
                f"{duration(each.ideal_s)} {error}",
                f"{each.ratio:.2f} {error}",
                f"{percent(each.linear_share)} {error}",
                f"{percent(each.idle_share)} {error}",
                full(each.num_stolen),
                full(each.num_moved),
                full(each.num_deaths),
            )
            for each in self.figures
        )
        header = (
            "replicas",
            "completion",
            "ideal",
            "of ideal",
            "of linear",
            "idle in last tenth",
            "stolen",
            "moved",
            "deaths",
        )
        facts = (
            ("rows", f"{full(self.num_rows)} of {self.workload}, seed {self.seed}"),
            ("longest row alone", duration(self.ideal.longest_row_s)),
            ("one full engine", duration(self.ideal.one_engine_s)),
        )
        notes = (
            "simulated; on held-out runs of this engine a completion is off by up to "
            f"{percent(found.completion_error)}, a step by {percent(found.step_error)}, and the "
            f"ratio of two orders by up to {percent(found.ratio_error)}: a smaller gain is none",
        )
        table = Table(header=header, rows=rows)
        section = Section(title="", facts=facts, table=table, notes=notes)
        return to_text("simulated pools", [section])


def validated_spec(cost_model: Path) -> tuple[EngineSpec, Validation]:
    """Read the cost model of a file and its validation, and return them.

    Raises ConfigError if the file has no cost model, or if the errors of simulations with it are
    unknown or too large.
    """
    cost = load_cost_model(cost_model)
    if cost is None:
        raise ConfigError(
            f"{cost_model}: there is no cost model for this model, backend and options; run "
            "raybatch bench calibrate with the same MODEL, --backend and --set"
        )
    validation = read_validation(cost_model)
    if failures := validation.failures():
        raise ConfigError(
            f"{cost_model}: simulations with this cost model are too far from held-out runs: "
            f"{'; '.join(failures)}. Run raybatch bench calibrate MODEL on a quiet host"
        )
    known = validation.full_step_tokens
    spec = EngineSpec(
        cost=cost,
        full_step_tokens=math.inf if known is None else known,
        is_vllm=validation.backend == "vllm",
        kv_bytes_per_token=validation.kv_token_bytes,
    )
    return spec, validation


def simulation_report(
    rows: SimulatedRows,
    cost_model: Path,
    pools: Sequence[PoolSpec],
    *,
    workload: str,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
) -> SimulationReport:
    """Simulate a job of `rows` on each of the pools; raises ConfigError as `validated_spec` does.

    `workload` and `seed` describe the rows in the report. `tell` is called with progress.
    """
    engine, validation = validated_spec(cost_model)
    tell("one engine")
    ideal = ideal_of(rows, engine)
    figures = []
    for pool in pools:
        tell(f"{pool.num_replicas} replicas")
        figures.append(simulate(rows, engine, pool, ideal))
    return SimulationReport(
        workload=workload,
        seed=seed,
        num_rows=len(rows),
        ideal=ideal,
        figures=tuple(figures),
        validation=validation,
    )


def rows_like(sink: str, names: Sequence[str]) -> SimulatedRows:
    """Return simulated rows with the prompt and output lengths of a job's output.

    Prefix groups are not simulated. Raises ConfigError if the output cannot be read, or none of
    its rows generated tokens.

    Args:
        sink: output folder of the job.
        names: Parquet files in it to read.
    """
    prompts, outputs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with error_context(f"--like {sink}: the output cannot be read"):
        store = store_of(sink)
        for name in names:
            table = pq.read_table(pa.BufferReader(store.read(name)))
            prompt = _lengths(table, "num_input_tokens")
            output = _lengths(table, "num_generated_tokens")
            is_good = (prompt > 0) & (output > 0)
            prompts.append(prompt[is_good])
            outputs.append(output[is_good])
    if not sum(map(len, outputs)):
        raise ConfigError(f"--like {sink}: no row of this output generated tokens")
    return SimulatedRows.of(np.concatenate(prompts), np.concatenate(outputs))


def _lengths(table: pa.Table, last: str) -> Ints:
    """Return a column of lengths, whose name may have a prefix; 0 where there is none."""
    name = next((name for name in table.column_names if name.endswith(last)), None)
    if name is None:
        raise ValueError(f"there is no column {last}")
    column = table.column(name)
    if not pa.types.is_integer(column.type):
        raise ValueError("its rows have several samples; only rows with one can be simulated")
    return np.asarray(column.fill_null(0).to_numpy(), np.int64)
