"""Records of planning: a source with its plan, and a run that is to follow one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.config import PlanConfig
from raybatch.inputs.source import Source
from raybatch.planning.fingerprint import InputFile
from raybatch.planning.store import PlanSubject
from raybatch.planning.stored import StoredPlan
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.plan import Arrangement, RowPlan
from raybatch.records.types import TokenIds
from raybatch.rows.options import StageConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedInput:
    """The rows that engines will see, in input order, and their plan; arrays are read only.

    Args:
        keys: block keys.
        asked: int64 [A], positions of the rows among all rows of the source.
        num_rows: of the source.
        max_tokens: int64 [A], longest output over all samples.
        expected_tokens: float64 [A], output to expect over all samples.
        unasked: rows that no engine sees: class of their error, or "filtered", to their number.
        plan: of these rows.
        whole: plan of all rows of the source.
        found: what they share.
        prompts: their token ids, where they are in memory.
        is_probed: `expected_tokens` come from rows that were generated before the plan.
    """

    keys: BlockKeys
    asked: npt.NDArray[np.int64]
    num_rows: int
    max_tokens: npt.NDArray[np.int64]
    expected_tokens: npt.NDArray[np.float64]
    unasked: Mapping[str, int]
    plan: RowPlan
    whole: RowPlan
    found: Arrangement
    prompts: Sequence[TokenIds] | None = None
    is_probed: bool = False


class UnitRunner(Protocol):
    """Generates the rows of a run and writes them, unit by unit.

    Rows are tables, one after the other, or a dataset of Ray where the runner is not local.
    """

    @property
    def is_local(self) -> bool:
        """Whether it runs in this process, without Ray."""

    def todo(self, stored: StoredPlan) -> npt.NDArray[np.bool_]:
        """Return which units of a plan are still to be written, bool [units]."""

    def run(self, stored: StoredPlan, rows: Any) -> None:  # noqa: ANN401 - Ray has no types
        """Generate and write rows with the columns of `raybatch.rows.plan_columns`."""

    def collect(self, rows: Sequence[pa.Table]) -> pa.Table:
        """Generate rows before there is a plan; return them as the journal has them."""

    def keep(self, stored: StoredPlan, units: npt.NDArray[np.int64], finished: pa.Table) -> None:
        """Write finished rows, each to its unit, or to the journal where a unit is not complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """What a run and its plan are about.

    Args:
        source: with at least one row.
        config: of the stage, with the id column of the run.
        plan: options of the plan.
        sink: of the job.
        row_id_column: column to make for ids; None where the user has one.
        units: runs the plan; None where it is only made.
        fingerprint: what decides the answers.
        files: of the source.
        partition_by: columns of the source by which the output is laid out.
        number: of the plan among those of the output, from 1.
        first_unit: number in the output of the plan's first unit.
    """

    source: Source
    config: StageConfig
    plan: PlanConfig
    sink: str
    row_id_column: str | None
    units: UnitRunner | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[InputFile] = ()
    partition_by: tuple[str, ...] = ()
    number: int = 1
    first_unit: int = 0

    @property
    def subject(self) -> PlanSubject:
        """What the plan is of."""
        return PlanSubject(
            options=self.plan,
            files=self.files,
            fingerprint=self.fingerprint,
            source=self.source.root,
            model=self.config.model,
            partition_by=self.partition_by,
            number=self.number,
            first_unit=self.first_unit,
            skipped=self.source.skipped,
            partition_types=tuple(map(self._type_name, self.partition_by)),
        )

    def _type_name(self, column: str) -> str:
        kind = self.source.schema.field(column).type
        return str(kind.value_type if pa.types.is_dictionary(kind) else kind)

    @property
    def runner(self) -> UnitRunner:
        """What runs the plan."""
        assert self.units is not None, "this plan is not to be run"
        return self.units
