"""Rows of the tasks that generate nothing: their options, and prompts that fit the context."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raybatch.errors import ConfigError
from raybatch.records.payload import DOCUMENT_AT, POOLING, add_payload
from raybatch.records.pooling import Pooling, pooling_of
from raybatch.records.types import Sampling
from raybatch.rows.batches import json_value, python_values
from raybatch.rows.options import OnTooLong
from raybatch.rows.prompt import Prompt
from raybatch.rows.prompt_inputs import column_of
from raybatch.rows.schema import describe_error

# of every row: a backend ends it with its one vector
POOLED = Sampling(max_tokens=1)


def with_pooling(
    prompts: Sequence[Prompt], table: pa.Table, *, pooling: Pooling, column: str | None
) -> Sequence[Prompt]:
    """Return the prompts of rows with their options; a bad value makes an error row.

    Args:
        prompts: of each row.
        table: the rows, read only.
        pooling: options of the stage.
        column: of JSON texts or structs with options that win over them; None for none.
    """
    if column is None:
        given = pooling.given()
        if not given:
            return prompts
        return [_with(prompt, given) for prompt in prompts]
    known: dict[str, Mapping[str, Any] | str] = {}
    found = []
    for prompt, value in zip(prompts, python_values(column_of(table, column)), strict=True):
        key = repr(value)
        if key not in known:
            known[key] = _options(value, pooling, column)
        found.append(_with(prompt, known[key]))
    return found


def fit_pooled(prompt: Prompt, *, max_len: int | None, on_too_long: OnTooLong) -> Prompt:
    """Return the prompt as it fits the context, which it may fill; cut or refused where it is long.

    What the tokenizer puts around a text, and the query of a document, is never cut.
    """
    ids = prompt.token_ids
    if max_len is None or ids is None or prompt.error or len(ids) <= max_len:
        return prompt
    border = json.loads(prompt.payload or "{}").get(DOCUMENT_AT, 0)
    excess = len(ids) - border - max_len
    start, stop = prompt.cuttable or (0, len(ids))
    if max(excess, border - max_len) <= 0:
        return prompt
    if on_too_long == "drop":
        return prompt._replace(is_filtered=True)
    if on_too_long == "error" or border > max_len or stop - start <= excess:
        longest = max(len(ids) - border, border)
        way_out = "set on_too_long to cut or drop such rows, or cut them before"
        if border > max_len:
            way_out = "a query is never cut: shorten it, or leave the row out"
        return prompt._replace(
            error=f"PromptTooLong: {longest} prompt tokens in a context of {max_len}; {way_out}"
        )
    cut = slice(start, start + excess) if on_too_long == "truncate_left" else None
    cut = cut or slice(stop - excess, stop)
    # its bounds are not those of the prompt that is left
    return prompt._replace(token_ids=np.delete(ids, cut), cuttable=None)


def _options(value: object, pooling: Pooling, column: str) -> Mapping[str, Any] | str:
    """Return the options of a row, or what is wrong with them."""
    try:
        given = json_value(value)
        # a row without options has those of the stage
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise ConfigError(f"pooling options must be a JSON object, got {value!r}")
        return pooling_of(given, default=pooling).given()
    except (ConfigError, ValueError) as error:
        return describe_error("InvalidPooling", f"column {column!r}: {error}")


def _with(prompt: Prompt, options: Mapping[str, Any] | str) -> Prompt:
    if prompt.error or not options:
        return prompt
    if isinstance(options, str):
        return prompt._replace(error=options)
    return prompt._replace(payload=add_payload(prompt.payload, {POOLING: options}))
