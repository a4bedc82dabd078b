"""What the rows of one processor leave behind on their way into the next one."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from raybatch.errors import ConfigError
from raybatch.stages.schema import OutputSchema

SAMPLING_COLUMN = "sampling_params"
# in the order in which they are looked for
PROMPT_COLUMNS = ("messages", "tokenized_prompt", "prompt")


def drop_leftovers(
    table: pa.Table, before: pa.Table, returned: Sequence[Mapping[str, Any] | None]
) -> pa.Table:
    """Drop the columns of an earlier processor: its outputs, and inputs that are not asked again.

    Args:
        table: after `preprocess`.
        before: the same rows before it.
        returned: what `preprocess` returned for each row; None for a row with an error.

    Raises:
        ConfigError: there are no prompts but the earlier processor's, or several may be meant.
    """
    names = {name for row in returned if row is not None for name in row}
    asked = _asked(before, returned)
    for name in PROMPT_COLUMNS:
        if name in names and name not in asked and _is_changed(name, table, before):
            raise ConfigError(
                f"preprocess returns {_listed(asked)} and changes {name!r}, which an earlier "
                "processor was asked: both may be meant; return only the one to ask"
            )
    kept = {*asked, SAMPLING_COLUMN} if SAMPLING_COLUMN in names else set(asked)
    leftovers = {
        *OutputSchema(has_logprobs=True).arrow().names,
        *({*PROMPT_COLUMNS, SAMPLING_COLUMN} - kept),
    }
    return table.drop_columns([name for name in table.column_names if name in leftovers])


def _asked(before: pa.Table, returned: Sequence[Mapping[str, Any] | None]) -> tuple[str, ...]:
    """Return the prompts to ask, by their names alone: values differ from row batch to row batch.

    A prompt that an earlier processor had is asked again where it is the only one. Beside a new
    one, as in {**row, "prompt": ...}, it is only handed through.
    """
    old = _prompts_in(before.column_names)
    if not old:
        return _prompts_in({name for row in returned if row is not None for name in row})
    choices = {_choice(row, old) for row in returned if row is not None}
    if len(choices) > 1:
        told = " for some rows, and for others ".join(_listed(c) for c in sorted(choices))
        raise ConfigError(f"preprocess returns {told}; return the same prompt for every row")
    (asked,) = choices or {()}
    if choices and not asked:
        raise ConfigError(
            f"the column {old[0]!r} holds what an earlier processor was asked; to ask it again, "
            f"return it from preprocess, as in lambda row: {{{old[0]!r}: row[{old[0]!r}]}}; else "
            "return new messages, prompt or tokenized_prompt"
        )
    if len(asked) > 1 and asked[0] in old:
        raise ConfigError(
            f"preprocess returns {_listed(asked)}, and an earlier processor had them all, so that "
            "nothing says which one to ask; return only that one"
        )
    return asked


def _choice(row: Mapping[str, Any], old: Collection[str]) -> tuple[str, ...]:
    names = _prompts_in(row)
    return tuple(name for name in names if name not in old) or names


def _prompts_in(names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in PROMPT_COLUMNS if name in names)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names)) or "no prompt"


def _is_changed(name: str, table: pa.Table, before: pa.Table) -> bool:
    return not table.column(name).equals(before.column(name))
