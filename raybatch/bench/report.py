"""What `raybatch bench gpu` found, as text and as a file to send in."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from raybatch.bench.engine_run import EngineResult, RowsRun
from raybatch.bench.layers import LayerFigures
from raybatch.bench.machine import Limits, Machine
from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import full, percent


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTokens:
    """Rows of a float32 model for which native engine and transformers gave equal tokens."""

    equal_rows: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """What was measured on one model; `layers` are None where that failed."""

    name: str
    num_parameters: int
    layers: LayerFigures | None
    engines: tuple[EngineResult, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """All that was measured; `checked` is None where that failed, and `failures` say why."""

    machine: Machine
    limits: Limits
    checked: CheckedTokens | None
    models: tuple[ModelFigures, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @property
    def is_right(self) -> bool:
        """Whether the tokens were those of transformers, and nothing failed."""
        checked = self.checked
        return checked is not None and checked.equal_rows == checked.num_rows and not self.failures

    def to_text(self) -> str:
        machine, checked = self.machine, self.checked
        memory = "" if machine.memory_gib is None else f", {machine.memory_gib:g} GiB"
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        tokens = (
            "not compared, see below"
            if checked is None
            else f"equal for {checked.equal_rows} of {checked.num_rows} rows"
        )
        facts = (
            ("device", f"{machine.device} ({machine.capability}{memory})"),
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
        notes = (*(f"FAILED: {text}" for text in self.failures), *self.notes)
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
    engines = Table(
        header=("rows", *kinds, *["equal rows"] * (len(kinds) > 1)),
        rows=tuple(
            (runs[0].name, *map(_cell, runs), *[_equal(runs)] * (len(kinds) > 1))
            for runs in zip(*(engine.runs for engine in model.engines), strict=True)
        ),
    )
    facts = (
        ("model", name),
        ("ops that agree with torch", agreeing or ("none" if ops else "not compared")),
    )
    sections = [Section(title="", facts=facts)]
    if layers.rows:
        sections.append(Section(title="", table=layers))
    if engines.rows:
        sections.append(Section(title="", table=engines))
    return sections


def _cell(run: RowsRun) -> str:
    seconds = statistics.median(run.seconds)
    return f"{seconds:.3g} ({full((run.prompt_tokens + run.output_tokens) / seconds)})"


def _equal(runs: Sequence[RowsRun]) -> str:
    """Return for how many of the compared rows all engines gave the same tokens."""
    rows = list(zip(*(run.token_ids for run in runs), strict=True))
    return f"{sum(len(set(tokens)) == 1 for tokens in rows)} of {len(rows)}"
