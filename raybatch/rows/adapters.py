"""Which adapter answers each row: names in a column become places in the payload of requests."""

from collections.abc import Sequence

import pyarrow as pa

from raybatch.backends.registry import type_of
from raybatch.errors import ConfigError
from raybatch.models.adapters import adapter_source, check_adapter
from raybatch.records.payload import LORA, add_payload
from raybatch.rows.batches import python_values
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt import Prompt
from raybatch.rows.prompt_inputs import column_of
from raybatch.rows.schema import describe_error


class Adapters:
    """Finds the adapters of rows; each that is there is looked at once, others once per row batch.

    Args:
        config: of the stage.
    """

    def __init__(self, config: StageConfig) -> None:
        self._config = config
        kwargs = config.backend.options.get("engine_kwargs") or {}
        has_ranks = type_of(config.backend).takes_vllm_options
        self._max_rank = kwargs.get("max_lora_rank", 16) if has_ranks else None
        self._sources: dict[str, str] = {}

    def on(self, prompts: Sequence[Prompt], table: pa.Table) -> Sequence[Prompt]:
        """Return the prompts of rows with their adapters; an unknown one makes an error row."""
        column = self._config.lora_column
        if column is None:
            return prompts
        # what failed may be there for the next row batch
        refused: dict[str, str] = {}
        values = python_values(column_of(table, column))
        return [
            prompt
            if prompt.error or value in (None, "", self._config.model)
            else self._with(prompt, value, refused)
            for prompt, value in zip(prompts, values, strict=True)
        ]

    def _with(self, prompt: Prompt, name: object, refused: dict[str, str]) -> Prompt:
        if not isinstance(name, str):
            error = describe_error("UnknownAdapter", f"a name must be a text, got {name!r:.100}")
            return prompt._replace(error=error)
        if name not in self._sources and name not in refused:
            self._find(name, refused)
        if name in refused:
            return prompt._replace(error=refused[name])
        return prompt._replace(payload=add_payload(prompt.payload, {LORA: self._sources[name]}))

    def _find(self, name: str, refused: dict[str, str]) -> None:
        """Note where an adapter lies, or in `refused` what is wrong with it."""
        try:
            source = adapter_source(name, self._config.lora_path)
            check_adapter(source, max_rank=self._max_rank)
        except ConfigError as error:
            refused[name] = describe_error("UnknownAdapter", error)
        else:
            self._sources[name] = source
