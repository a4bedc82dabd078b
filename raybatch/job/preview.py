"""Answers some rows of a job on its engines, and writes nothing."""

from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import Any

import numpy as np
import pyarrow as pa
from rich.box import ASCII
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raybatch.durable.journal import ROW
from raybatch.durable.parts import empty_table
from raybatch.errors import ConfigError
from raybatch.explanation.outlook import Extrapolation, extrapolate
from raybatch.explanation.query import JobQuery
from raybatch.inputs.source import Source
from raybatch.job.config import JobConfig
from raybatch.job.executor import Executor, stage_of_executor
from raybatch.job.progress import Progress, shown
from raybatch.job.run import run_spec
from raybatch.job.watching import PoolWatch, RunClock
from raybatch.pictures.document import Section, to_fragment, to_text
from raybatch.pictures.document import Table as Cells
from raybatch.pictures.wording import amount, count, duration, full
from raybatch.planning.dataset import SampledSource
from raybatch.planning.fingerprint import output_schema
from raybatch.planning.run import fit_units, generate_small
from raybatch.planning.tally import counted_columns
from raybatch.policy.cost.estimate import Band
from raybatch.policy.deadline import amount_of_money
from raybatch.policy.executor import engines_for
from raybatch.records.arrays import Floats
from raybatch.redaction import redacted
from raybatch.rows.schema import ERROR_COLUMN, NUMBERS, ROW_ID, OutputSchema
from raybatch.rows.stage_model import find_model, load_tokenizer
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.unit_run import collect_rows
from raybatch.stages.unit_writer import in_schema

# width without a terminal
WIDTH = 100
# characters shown of a prompt or an answer, from both ends of a longer one
_MAX_SHOWN = 480
_MAX_ID = 18
_NOTES = {
    "length": "ended by max_tokens",
    "capacity": "ended: too long for the KV cache",
    "filtered": "skipped: too long",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Preview:
    """Print or inspect what `Job.preview` returns: sampled rows in input order.

    Args:
        rows: the rows as in the output of a run, error rows included.
        prompts: rendered prompt of each row; "" for a row without one.
        rest: estimates for the whole input; None without rows.
    """

    source: str
    model: str
    rows: pa.Table
    prompts: tuple[str, ...]
    output: OutputSchema
    rest: Extrapolation | None

    @property
    def num_failed(self) -> int:
        """Number of error rows."""
        return sum(map(bool, self._column(ERROR_COLUMN)))

    @property
    def title(self) -> str:
        """Source and model in one line, and the number of rows shown."""
        total = full(0 if self.rest is None else self.rest.num_rows)
        shown = count(self.rows.num_rows, "row")
        return f"raybatch preview: {shown} of {total} in {self.source} with {self.model}"

    def exit_code(self) -> int:
        """Return 0, or 2 with error rows, as for a run."""
        return 2 if self.num_failed else 0

    def to_text(self, width: int = WIDTH) -> str:
        """Return a table of prompts and answers, at most `width` wide, and the estimates below."""
        table = Table(box=ASCII, show_lines=True, width=width, pad_edge=False)
        table.add_column("row", max_width=_MAX_ID, overflow="fold")
        for name in ("prompt", "answer"):
            table.add_column(name, ratio=1, overflow="fold")
        for cells in self._cells():
            table.add_row(*map(Text, cells))
        console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
        with console.capture() as captured:
            console.print(table)
        rows = (line.rstrip() for line in captured.get().splitlines())
        first, *others = to_text(self.title, [self._rest_section()]).splitlines()
        return "\n".join([first, *rows, *others])

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        cells = Cells(header=("row", "prompt", "answer"), rows=tuple(self._cells()))
        return to_fragment(self.title, (Section(title="Rows", table=cells), self._rest_section()))

    def _cells(self) -> list[tuple[str, str, str]]:
        ids, errors = self._column(ROW_ID), self._column(ERROR_COLUMN)
        rows = zip(ids, self.prompts, self._answers(), errors, strict=True)
        return [
            (_shown(row_id), _shown(prompt), _shown(f"failed: {error}" if error else answer))
            for row_id, prompt, answer, error in rows
        ]

    def _answers(self) -> list[str]:
        if self.output.task != "generate":
            values = self._column(NUMBERS[self.output.task][0])
            return [f"{len(v)} numbers" if isinstance(v, Sized) else f"{v}" for v in values]
        texts, reasons = self._column("generated_text"), self._column("finish_reason")
        if self.output.num_samples == 1:
            return [_noted(*pair) for pair in zip(texts, reasons, strict=True)]
        return [
            "\n".join(
                f"({number}) {_noted(*pair)}"
                for number, pair in enumerate(zip(some or (), ends or (), strict=False), 1)
            )
            for some, ends in zip(texts, reasons, strict=True)
        ]

    def _column(self, name: str) -> list[Any]:
        return self.rows.column(self.output.prefix + name).to_pylist()  # type: ignore[no-any-return]

    def _rest_section(self) -> Section:
        rest, notes = self.rest, ["nothing was written"]
        if rest is None:
            return Section(title="All rows", notes=("the source has no rows", *notes))
        tokens = f"prompts have {_about(rest.prompt_tokens, amount)} tokens"
        if rest.generated_tokens.expected:
            tokens += f", answers {_about(rest.generated_tokens, amount)}"
        facts = [("all rows", f"{full(rest.num_rows)}; {tokens}")]
        if rest.sampled_s:
            speed = f"at least {full(rest.sampled_tokens / rest.sampled_s)} tokens/s a replica"
            took = f"{amount(rest.sampled_tokens)} of prompts and answers in {rest.sampled_s:.2g} s"
            few = f"; {count(rest.num_sampled, 'row')} may not fill an engine"
            is_sample = rest.num_sampled < rest.num_rows
            facts.append(("speed", f"{speed}: {took}{few * is_sample}"))
        replicas = count(rest.num_replicas, "replica")
        if (time := rest.time) is not None:
            of_time = Band(expected=time.wall_s, low=time.low_s, high=time.high_s)
            facts.append(("time", f"{_about(of_time, duration)} on {replicas}, {time.origin}"))
        elif rest.slowest_s is not None:
            slowest = f"at most about {duration(rest.slowest_s)} on {replicas}"
            facts.append(("time", f"{slowest}, at that speed; full engines are faster"))
            notes.append(f"{rest.no_time}; `raybatch explain` measures the speed of engines")
        else:
            facts.append(("time", f"unknown: {rest.no_time}"))
        if rest.money is not None:
            facts.append(("money", _about(rest.money, amount_of_money)))
        if rest.num_sampled < rest.num_rows:
            notes.append("more rows share more prefixes: `raybatch explain` reads all of them")
        return Section(title="All rows", facts=tuple(facts), notes=tuple(notes))


def _about(band: Band, wording: Callable[[float], str]) -> str:
    text = f"about {wording(band.expected)}"
    return (
        text if band.low == band.high else f"{text} ({wording(band.low)} to {wording(band.high)})"
    )


def _noted(text: str | None, reason: str | None) -> str:
    note = _NOTES.get(reason or "", "")
    return f"{text or ''} [{note}]".lstrip() if note else text or ""


def _shown(text: str | None) -> str:
    """Return a text without terminal control characters, shortened in the middle."""
    text = (text or "").strip()
    if (left := len(text) - _MAX_SHOWN) > 0:
        half = _MAX_SHOWN // 2
        text = f"{text[:half]}\n[... {count(left, 'character')} ...]\n{text[-half:]}"
    text = text.replace("\t", "    ")
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def check_limit(limit: object) -> None:
    """Raise ConfigError unless `limit` is a whole number of at least 1."""
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ConfigError(
            f"limit must be a whole number of rows of at least 1, got {limit!r}; such as 20"
        )


def preview_rows(
    config: JobConfig,
    stage: type[StageFeeder],
    source: Source,
    executor: Executor,
    limit: int,
    progress: Progress,
) -> Preview:
    """Generate `limit` rows sampled across a source, or all if it has fewer.

    The source has been read and checked; executor and stage are those of the whole run.
    """
    schema, output = output_schema(source.schema, config.stage), config.stage.output
    preview = Preview(
        source=redacted(config.source),
        model=redacted(config.stage.model),
        rows=empty_table(schema),
        prompts=(),
        output=output,
        rest=None,
    )
    if not source.num_rows:
        return preview
    query = JobQuery(
        job=run_spec(config, source),
        spec=stage.pool.spec,
        name=config.source,
        price_per_engine_hour=config.limits.price_per_engine_hour,
        measure=False,
        is_local=executor.is_local,
    )
    sample = SampledSource.of(source, limit)
    # a probe would generate rows twice
    plan = replace(fit_units(config.plan, sample), lengths="auto")
    job = run_spec(replace(config, plan=plan), sample)
    if executor.is_local:
        # no more engines than these rows need, or a whole weight-sharing group
        number = stage.pool.spec.pool.share_group
        number = number or engines_for(sample.num_rows, executor.num_engines)
        stage = stage_of_executor(stage, replace(executor, num_engines=number), ())
    stage = stage.of_run(id_column=job.row_id_column)
    stage.pool.connect()
    before = stage.stats()
    watch = partial(PoolWatch, read_stats=stage.stats, num_rows=sample.num_rows, clock=RunClock())
    with shown(progress) as show, watch(callback=show):
        # engines load weights while prompts are rendered
        stage.pool.start()
        collect = partial(collect_rows, stage=stage, waves=config.waves)
        rows, planned, finished = generate_small(job, partial(collect, is_local=executor.is_local))
    after, again = stage.stats(), stage.stats(again=True)
    finished = finished.sort_by(ROW)
    counted = counted_columns(finished, output)
    decode = load_tokenizer(job.config, find_model(job.config)).decode
    return replace(
        preview,
        rows=in_schema(finished, schema),
        prompts=tuple(
            "" if p.token_ids is None else decode(p.token_ids, skip_special_tokens=False, after=())
            for p in rows.prompts
        ),
        rest=extrapolate(
            query,
            planned,
            prompt_tokens=_per_row(counted.column("num_input_tokens")),
            generated_tokens=_per_row(counted.column("num_generated_tokens")),
            busy_s=max(0.0, after.busy_s - before.busy_s),
            cost=after.cost + again.cost,
            num_rows=source.num_rows,
        ),
    )


def _per_row(column: pa.ChunkedArray) -> Floats:
    """Return the tokens of each row over all samples; 0 for null."""
    values = (value if isinstance(value, list) else [value] for value in column.to_pylist())
    return np.array([sum(number or 0 for number in row) for row in values], float)
