"""What the rows of one processor leave behind on their way into the next one."""

from collections.abc import Collection

import pyarrow as pa

from raybatch.errors import ConfigError
from raybatch.stages.schema import OutputSchema

SAMPLING_COLUMN = "sampling_params"
# in the order in which they are looked for
PROMPT_COLUMNS = ("messages", "tokenized_prompt", "prompt")


def drop_leftovers(
    table: pa.Table, before: pa.Table, returned: Collection[str], *, is_asking: bool
) -> pa.Table:
    """Drop the columns of an earlier processor: its outputs, and inputs that are not asked again.

    Prompts that `preprocess` only hands through, as in {**row, "prompt": ...}, count where it has
    no others.

    Args:
        table: after `preprocess`.
        before: the same rows before it.
        returned: names of what `preprocess` returned.
        is_asking: some row is without an error, and needs a prompt.

    Raises:
        ConfigError: only the earlier processor's prompts are there.
    """
    asked = [name for name in PROMPT_COLUMNS if name in returned]
    new = [name for name in asked if _is_changed(name, table, before)] or asked
    old = next((name for name in PROMPT_COLUMNS if name in before.column_names), None)
    if is_asking and old is not None and not new:
        raise ConfigError(
            f"the column {old!r} holds what an earlier processor was asked; to ask it again, "
            f"return it from preprocess, as in lambda row: {{{old!r}: row[{old!r}]}}; else "
            "return new messages, prompt or tokenized_prompt"
        )
    kept = {*new, SAMPLING_COLUMN} if SAMPLING_COLUMN in returned else set(new)
    leftovers = {
        *OutputSchema(has_logprobs=True).arrow().names,
        *({*PROMPT_COLUMNS, SAMPLING_COLUMN} - kept),
    }
    return table.drop_columns([name for name in table.column_names if name in leftovers])


def _is_changed(name: str, table: pa.Table, before: pa.Table) -> bool:
    return name not in before.column_names or not table.column(name).equals(before.column(name))
