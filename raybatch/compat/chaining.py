"""What the rows of one processor leave behind on their way into the next one."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from raybatch.errors import ConfigError
from raybatch.rows.schema import OutputSchema

SAMPLING_COLUMN = "sampling_params"
POOLING_COLUMN = "pooling_params"
# of an adapter
ADAPTER_COLUMN = "model"
# of images, as ray.data.llm calls it
MEDIA_COLUMN = "multimodal_data"
# the prompts of a processor, in tokens
PROMPT_IDS_COLUMN = "prompt_token_ids"
# in the order in which they are looked for unless a processor says another
PROMPT_COLUMNS = ("messages", "tokenized_prompt", "prompt")
_OPTION_COLUMNS = {SAMPLING_COLUMN, POOLING_COLUMN, MEDIA_COLUMN}


def drop_leftovers(
    table: pa.Table,
    before: pa.Table,
    returned: Sequence[Mapping[str, Any] | None],
    *,
    prompt_columns: Sequence[str] = PROMPT_COLUMNS,
) -> pa.Table:
    """Drop the columns of an earlier processor: its outputs, and inputs that are not used again.

    Outputs that have the names of data (numbers, and what parsers find) stay; a stage that writes
    them again refuses them.

    Args:
        returned: what `preprocess` returned for each row; None for a row with an error.
        prompt_columns: those that the stage asks, the first of them that is there; none where it
            asks pairs of query and document.

    Raises:
        ConfigError: there are no prompts but the earlier processor's, or several may be meant.
    """
    names = {name for row in returned if row is not None for name in row}
    asked = _asked(before, returned, prompt_columns)
    for name in prompt_columns:
        if name in names and name not in asked and _is_changed(name, table, before):
            raise ConfigError(
                f"preprocess returns {_listed(asked)} and changes {name!r}, which an earlier "
                "processor was asked: both may be meant; return only the one to ask"
            )
    # to a stage that asks pairs, a prompt that it is handed is data
    handed = _OPTION_COLUMNS if prompt_columns else {*PROMPT_COLUMNS, *_OPTION_COLUMNS}
    kept = {*asked, *(handed & names)}
    leftovers = {
        *OutputSchema(has_logprobs=True).arrow().names,
        PROMPT_IDS_COLUMN,
        *({*(prompt_columns or PROMPT_COLUMNS), *_OPTION_COLUMNS} - kept),
    }
    return table.drop_columns([name for name in table.column_names if name in leftovers])


def _asked(
    before: pa.Table, returned: Sequence[Mapping[str, Any] | None], prompt_columns: Sequence[str]
) -> tuple[str, ...]:
    """Return the prompts to ask, by their names alone: values differ from row batch to row batch.

    A prompt that an earlier processor had is asked again where it is the only one, or the first
    that the stage asks. Beside a new one, as in {**row, "prompt": ...}, it is only handed through.
    """
    old = _prompts_in(before.column_names, prompt_columns)
    if not old:
        names = {name for row in returned if row is not None for name in row}
        return _prompts_in(names, prompt_columns)
    choices = {_choice(row, old, prompt_columns) for row in returned if row is not None}
    if len(choices) > 1:
        several = " for some rows, and for others ".join(_listed(c) for c in sorted(choices))
        raise ConfigError(f"preprocess returns {several}; return the same prompt for every row")
    (asked,) = choices or {()}
    if choices and not asked:
        raise ConfigError(
            f"the column {old[0]!r} holds what an earlier processor was asked; to ask it again, "
            f"return it from preprocess, as in lambda row: {{{old[0]!r}: row[{old[0]!r}]}}; else "
            "return new messages, prompt or tokenized_prompt"
        )
    return asked[:1] if asked and asked[0] in old else asked


def _choice(
    row: Mapping[str, Any], old: Collection[str], prompt_columns: Sequence[str]
) -> tuple[str, ...]:
    names = _prompts_in(row, prompt_columns)
    return tuple(name for name in names if name not in old) or names


def _prompts_in(names: Collection[str], prompt_columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in prompt_columns if name in names)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names)) or "no prompt"


def _is_changed(name: str, table: pa.Table, before: pa.Table) -> bool:
    return not table.column(name).equals(before.column(name))
