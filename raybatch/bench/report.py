"""What `raybatch bench gpu` found, as text and as a file to send in."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from raybatch.bench.engine_run import EngineResult, RowsRun
from raybatch.bench.layers import LayerFigures
from raybatch.bench.machine import Limits, Machine
from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import count, full, percent


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTokens:
    """Rows of a float32 model for which native engine and transformers gave equal tokens."""

    equal_rows: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """What was measured on one model; `layers` are None where that failed or had no time."""

    name: str
    num_parameters: int
    layers: LayerFigures | None
    engines: tuple[EngineResult, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """All that was measured, within so many minutes.

    `checked` is None where that failed or had no time; `failures` and `skipped` say which.
    """

    machine: Machine
    minutes: float
    limits: Limits
    checked: CheckedTokens | None
    models: tuple[ModelFigures, ...]
    failures: tuple[str, ...]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @property
    def is_right(self) -> bool:
        """Whether nothing failed, and no token was another than that of transformers.

        What was skipped for lack of time is no failure.
        """
        checked = self.checked
        return not self.failures and (checked is None or checked.equal_rows == checked.num_rows)

    def to_text(self) -> str:
        machine, checked = self.machine, self.checked
        memory = "" if machine.memory_gib is None else f", {machine.memory_gib:g} GiB"
        threads = "" if machine.num_threads is None else f", {count(machine.num_threads, 'thread')}"
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        tokens = (
            "not compared, see below"
            if checked is None
            else f"equal for {checked.equal_rows} of {checked.num_rows} rows"
        )
        facts = (
            ("device", f"{machine.device} ({machine.capability}{memory}{threads})"),
            ("versions", versions + (f", CUDA {machine.cuda}" if machine.cuda else "")),
            (
                f"best rates, {self.limits.dtype}",
                f"{self.limits.operations_per_s / 1e12:.3g} TFLOP/s, "
                f"{self.limits.bytes_per_s / 1e9:,.0f} GB/s",
            ),
            ("tokens beside transformers", tokens),
        )
        sections = [Section(title="", facts=facts)]
        for model in self.models:
            sections += _sections(model)
        notes = (
            *(f"FAILED: {text}" for text in self.failures),
            *(f"skipped, --minutes {self.minutes:g} were over: {text}" for text in self.skipped),
            *self.notes,
        )
        sections.append(Section(title="", notes=notes))
        return to_text("raybatch bench gpu", sections)


def _sections(model: ModelFigures) -> list[Section]:
    name = f"{model.name} ({model.num_parameters / 1e6:,.0f}M parameters)"
    layers = Table(
        header=("module", "tokens", "time, ms", "of the best"),
        rows=tuple(
            (each.module, full(each.tokens), f"{1e3 * each.seconds:.3g}", percent(each.share, 0))
            for each in (model.layers.times if model.layers else ())
        ),
    )
    ops = () if model.layers is None else model.layers.ops
    agreeing = ", ".join(f"{op.name} {op.error:.1g}" for op in ops if op.agrees)
    kinds = [f"{engine.kind}, s (tokens/s)" for engine in model.engines]
    both = ["equal rows"] * (len(kinds) > 1)
    engines = Table(
        header=("rows", "number", "tokens in + out", *kinds, *both),
        rows=tuple(
            (*_facts(some), *map(_cell, some), *[_equal(some)] * len(both))
            for some in zip_longest(*(engine.runs for engine in model.engines))
        ),
    )
    facts = (
        ("model", name),
        ("ops agree with torch within", agreeing or ("none" if ops else "not compared")),
    )
    sections = [Section(title="", facts=facts)]
    if layers.rows:
        sections.append(Section(title="", table=layers))
    if engines.rows:
        sections.append(Section(title="", table=engines))
    return sections


def _facts(some: Sequence[RowsRun | None]) -> tuple[str, str, str]:
    run = next(run for run in some if run is not None)
    tokens = (run.prompt_tokens // run.num_rows, run.output_tokens // run.num_rows)
    return run.name, full(run.num_rows), " + ".join(map(full, tokens))


def _cell(run: RowsRun | None) -> str:
    if run is None:
        return "no time"
    seconds = statistics.median(run.seconds)
    return f"{seconds:.3g} ({full((run.prompt_tokens + run.output_tokens) / seconds)})"


def _equal(some: Sequence[RowsRun | None]) -> str:
    """Return for how many of the compared rows all engines gave the same tokens."""
    if None in some:
        return ""
    rows = list(zip(*(run.token_ids for run in some if run), strict=True))
    return f"{sum(len(set(tokens)) == 1 for tokens in rows)} of {len(rows)}"
