"""Processors run inside the process of the test, on the fake backend."""

from typing import Any

import pyarrow as pa

from raybatch.compat.processor import RowFunction
from raybatch.llm import ProcessorConfig, build_processor
from tests.stages.support import answer, local


class LocalRun:
    """One row batch through a processor.

    Attributes:
        table: what came out.
        requests: those that reached the engine.
    """

    def __init__(
        self,
        config: ProcessorConfig,
        rows: pa.Table | list[dict[str, Any]],
        preprocess: RowFunction | None = None,
        postprocess: RowFunction | None = None,
        **options: Any,
    ) -> None:
        processor = build_processor(config, preprocess, postprocess, **options)
        stage = local(processor.get_stage_by_name("LLMStage"))
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        table = answer(stage, processor.preprocess(table))
        self.table = table if processor.postprocess is None else processor.postprocess(table)
        self.requests = stage.pool.requests

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that came out, as dicts."""
        return self.table.to_pylist()


def user(text: str | None) -> list[dict[str, Any]]:
    """Return messages of one question."""
    return [{"role": "user", "content": text}]
