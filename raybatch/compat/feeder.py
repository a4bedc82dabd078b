"""The stage of a processor: as any other, with the columns that ray.data.llm adds beside ours."""

from collections.abc import Sequence

import pyarrow as pa

from raybatch.backends.registry import type_of
from raybatch.compat.chaining import PROMPT_IDS_COLUMN
from raybatch.errors import ConfigError
from raybatch.records.types import TokenIds
from raybatch.rows.prompt import Prompt
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.open_call import Answered
from raybatch.text.prompt_tokenizer import PromptTokenizer


class ProcessorFeeder(StageFeeder):
    """Adds the prompts that were asked to the answered rows."""

    def _check_columns(self, schema: pa.Schema) -> None:
        if PROMPT_IDS_COLUMN in schema.names:
            raise ConfigError(
                f"the input already has a column {PROMPT_IDS_COLUMN!r}, which the processor "
                "writes; rename it"
            )
        super()._check_columns(schema)

    def _finish(self, answered: Answered) -> pa.Table:
        prompts = answered.prompts
        if type_of(self.config.backend).is_endpoint:  # which renders and tokenizes payloads itself
            prompts = [p if p.payload is None else Prompt(None) for p in prompts]
        return add_prompts(super()._finish(answered), prompts, self._tokenizer)


def add_prompts(table: pa.Table, prompts: Sequence[Prompt], tokenizer: PromptTokenizer) -> pa.Table:
    """Return the table with `prompt_token_ids`, and their text where it has no column `prompt`.

    Args:
        table: of answered rows; read only.
        prompts: of its rows; one that failed before it had tokens is null in both columns. Images
            are in them as their chat template marks their places.
        tokenizer: of the model.
    """
    ids = [p.token_ids if p.asked_ids is None else p.asked_ids for p in prompts]
    table = table.append_column(PROMPT_IDS_COLUMN, pa.array(ids, pa.list_(pa.int32())))
    if "prompt" in table.column_names:
        return table
    return table.append_column("prompt", pa.array(_texts(ids, tokenizer), pa.string()))


def _texts(ids: Sequence[TokenIds | None], tokenizer: PromptTokenizer) -> list[str | None]:
    try:
        found = iter(tokenizer.decode_batch([one for one in ids if one is not None], False))
    except Exception:  # a tokenizer may raise anything, and the ids alone say what was asked
        return [None] * len(ids)
    return [None if one is None else next(found) for one in ids]
