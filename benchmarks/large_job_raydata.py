"""The rows of `large_job.py` through `ray.data.llm`, whose engine answers without a model.

Chat template, tokenizer and the stages between them are those of `ray.data.llm`; only the class
that calls vLLM is replaced, by one that returns fixed tokens. It is what its pipeline costs a row.
"""

import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

OUTPUT = {"generated_text": "a b c d e f g h", "generated_tokens": list(range(8))}
# a replica and its stages hold three, and four tokenize and read as in a job of raybatch
NUM_TOKENIZERS, CPUS_OF_REPLICA = 4, 3


def run_once(folder: Path, sender: Connection, num_replicas: int) -> None:
    """Run the rows of a folder through a processor in this process, and send the seconds."""
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig
    from ray.llm._internal.batch.stages.base import StatefulStageUDF

    from raybatch.demo import CHECKPOINT_PATH

    class NoEngine(StatefulStageUDF):  # type: ignore[misc]
        """The engine stage without an engine."""

        def __init__(self, data_column: str, expected_input_keys: list[str], **_: object) -> None:
            super().__init__(data_column, expected_input_keys)

        async def udf(self, rows: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
            for row in rows:
                place = {self.IDX_IN_BATCH_COLUMN: row[self.IDX_IN_BATCH_COLUMN]}
                yield {**place, **OUTPUT, "num_input_tokens": len(row["tokenized_prompt"])}

    began = time.monotonic()
    ray.init(
        "local",
        num_cpus=NUM_TOKENIZERS + CPUS_OF_REPLICA * num_replicas,
        include_dashboard=False,
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    config = vLLMEngineProcessorConfig(
        model_source=str(CHECKPOINT_PATH),
        engine_kwargs={},
        concurrency=(num_replicas, num_replicas),
        accelerator_type=None,
        # without this the engine stage asks for a GPU
        placement_group_config={"bundles": [{"CPU": 1}]},
        batch_size=256,
        max_concurrent_batches=16,
        chat_template_stage={"enabled": True, "concurrency": (1, NUM_TOKENIZERS)},
        tokenize_stage={"enabled": True, "concurrency": (1, NUM_TOKENIZERS)},
        detokenize_stage=False,
    )

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "user", "content": row["prompt"]}
        return {"messages": [message], "sampling_params": {"max_tokens": 8}}

    def keep(row: dict[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in ("prompt", *OUTPUT, "num_input_tokens")}

    processor = build_processor(config, preprocess=ask, postprocess=keep)
    # an assignment would be validated again and ask for a GPU
    object.__setattr__(processor.get_stage_by_name("vLLMEngineStage"), "fn", NoEngine)
    rows = ray.data.read_parquet(str(folder / "in"))
    processor(rows).write_parquet(str(folder / "out-raydata"))
    seconds = time.monotonic() - began
    files = list((folder / "out-raydata").glob("*.parquet"))
    written = sum(pq.read_metadata(file).num_rows for file in files)
    sender.send({"seconds": round(seconds, 1), "files": len(files), "rows_written": written})
