"""Turns a row batch into requests for the pool: row ids, prompts, options, copies and seeds."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.wire.columns import request_table
from raybatch.actors.wire.records import DEDUP_KEY_BYTES
from raybatch.errors import ConfigError
from raybatch.records.payload import DOCUMENT_AT
from raybatch.records.types import UNBOUNDED_TOKENS, Sampling
from raybatch.rows.batches import large_rows, python_values
from raybatch.rows.options import OnTooLong, StageConfig
from raybatch.rows.plan_columns import PlanColumns
from raybatch.rows.prompt_inputs import column_of
from raybatch.rows.render import PromptReader
from raybatch.rows.row_options import row_samplings
from raybatch.rows.schema import describe_error
from raybatch.text.tokenizer import Prompt

logger = logging.getLogger(__name__)

# sampling of every pooled row: a backend ends it with its one vector
POOLED = Sampling(max_tokens=1)
_WAY_OUT = "set on_too_long to cut or drop such rows, or shorten them"
_FRAME = (
    "only the longest text is cut, and the rest of the prompt is too long; shorten it, or set "
    "on_too_long='drop' to drop such rows"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A row batch, ready for the pool.

    Args:
        table: only the user's columns.
        group_ids: prefix group of each row; None without a plan.
        rows: position in the row batch of the row of each request.
        copies: rows that are not requested, each with the earlier row that it duplicates.
        samplings: the distinct options, which the request table references by index.
        request_samplings: the options of each request.
    """

    table: pa.Table
    row_ids: Sequence[str]
    prompts: Sequence[Prompt]
    group_ids: Sequence[int | None] | None = None
    rows: Sequence[int]
    copies: Mapping[int, int]
    requests: pa.Table
    samplings: Sequence[Sampling]
    request_samplings: Sequence[Sampling]

    def num_copies(self) -> npt.NDArray[np.int32]:
        """Return how many rows duplicate the row of each request, int32 [requests]."""
        counts = Counter(self.copies.values())
        return np.array([counts[row] for row in self.rows], np.int32)

    def of_results(self, results: pa.Table) -> tuple[list[int], "Prepared", pa.Table]:
        """Return the rows of some results, and their copies, as a smaller batch.

        `results` are of some of the requests, each with all its samples. Returns (positions of the
        rows in this batch, ascending; the smaller batch; the results, renumbered for it).
        """
        column = results.schema.get_field_index("row")
        requests, renumbered = np.unique(results.column(column).to_numpy(), return_inverse=True)
        originals = [self.rows[request] for request in requests]
        answered = set(originals)
        copies = {c: row for c, row in self.copies.items() if row in answered}
        rows = sorted([*originals, *copies])
        place = {row: i for i, row in enumerate(rows)}
        numbers = pa.array(renumbered.astype(np.int32))
        part = replace(
            self,
            table=self.table.take(pa.array(rows, pa.int64())),
            row_ids=[self.row_ids[row] for row in rows],
            prompts=[self.prompts[row] for row in rows],
            group_ids=None if self.group_ids is None else [self.group_ids[row] for row in rows],
            rows=[place[row] for row in originals],
            copies={place[copy]: place[row] for copy, row in copies.items()},
            requests=self.requests.slice(0, 0),  # not needed once there are results
            request_samplings=[self.request_samplings[request] for request in requests],
        )
        return rows, part, results.set_column(column, results.schema.field(column), numbers)


def prepare(
    table: pa.Table,
    *,
    config: StageConfig,
    reader: PromptReader,
    max_model_len: int | None,
    input_errors: Sequence[str] | None = None,
    planned: PlanColumns | None = None,
    changes: Mapping[str, Any] | None = None,
    refused: Mapping[int, str] | None = None,
) -> Prepared:
    """Render, tokenize and check every row; the error of a bad row is in its prompt.

    Args:
        max_model_len: longest prompt plus output; None for no limit.
        input_errors: error of each row before this stage, "" for none.
        changes: sampling options that override all others.
        refused: rows that are not requested, each with its error.
    """
    prompts = None if planned is None else planned.prompts
    if prompts is None:
        prompts = _read(table, reader, config, input_errors)
    samplings: list[Sampling | str] = [POOLED] * table.num_rows
    if config.task == "generate":
        samplings = row_samplings(
            table,
            config.sampling,
            overrides=config.overrides,
            sampling_column=config.sampling_column,
            fixed=config.fixed_options,
        )
    if changes is not None:
        samplings = [_changed(sampling, changes) for sampling in samplings]
    samplings = [s if isinstance(s, str) else reader.with_ends(s) for s in samplings]
    checked = partial(_checked, config=config, max_model_len=max_model_len)
    prompts = [checked(*pair) for pair in zip(prompts, samplings, strict=True)]
    row_ids, prompts = _identify(table, config, prompts)
    for row, error in (refused or {}).items():
        prompts[row] = prompts[row]._replace(error=prompts[row].error or error)
    rows = [row for row, prompt in enumerate(prompts) if prompt.is_requested]
    fitting = [_fitting(samplings[row], prompts[row], max_model_len) for row in rows]
    copies = find_copies(rows, prompts, fitting) if config.dedup else {}
    fitting = [sampling for row, sampling in zip(rows, fitting, strict=True) if row not in copies]
    rows = [row for row in rows if row not in copies]
    index = {sampling: i for i, sampling in enumerate(dict.fromkeys(fitting))}
    request_ids = [row_ids[row] for row in rows]
    seeds = [row_seed(s.seed, row_id) for s, row_id in zip(fitting, request_ids, strict=True)]
    return Prepared(
        table=table,
        row_ids=row_ids,
        prompts=prompts,
        group_ids=None if planned is None else planned.group_ids,
        rows=rows,
        copies=copies,
        samplings=list(index),
        request_samplings=fitting,
        requests=request_table(
            request_ids,
            [prompts[row].known_ids for row in rows],
            seeds=np.array(seeds, np.uint64),
            sampling=np.array([index[s] for s in fitting], np.int32),
            payloads=[prompts[row].payload for row in rows],
            **({} if planned is None else _planned_columns(planned, rows, fitting)),
        ),
    )


def take_input_errors(table: pa.Table, column: str | None) -> tuple[pa.Table, Sequence[str] | None]:
    """Return (table without the column of earlier errors, these errors; None without one)."""
    if column is None:
        return table, None
    errors: list[str] = column_of(table, column).to_pylist()
    return table.drop_columns([column]), errors


def _planned_columns(
    planned: PlanColumns, rows: Sequence[int], samplings: Sequence[Sampling]
) -> dict[str, Any]:
    """Return the plan of each request as arguments of `request_table`."""
    totals = [planned.expected_lens[row] for row in rows]
    return {
        "group_ids": [planned.group_ids[row] for row in rows],
        "prefix_lens": planned.prefix_lens[rows],
        # a plan has the expected tokens of all samples, an engine needs those of one
        "expected_lens": [
            None if total is None else -(-total // sampling.n)
            for total, sampling in zip(totals, samplings, strict=True)
        ],
    }


def find_copies(
    rows: Sequence[int], prompts: Sequence[Prompt], samplings: Sequence[Sampling]
) -> dict[int, int]:
    """Return duplicates, each with the earlier row that it equals, if sampling is deterministic."""
    first: dict[tuple[Sampling, bytes, str | None], int] = {}
    copies = {}
    for row, sampling in zip(rows, samplings, strict=True):
        if is_deterministic(sampling):
            key = (sampling, prompts[row].known_ids.tobytes(), prompts[row].payload)
            original = first.setdefault(key, row)
            if original != row:
                copies[row] = original
    return copies


def dedup_keys(prepared: Prepared) -> bytes:
    """Return keys by which equal requests are found, joined (see `Submission`); O(tokens)."""
    texts = {sampling: f"{sampling!r}\0".encode() for sampling in prepared.samplings}
    keys = []
    for row, sampling in zip(prepared.rows, prepared.request_samplings, strict=True):
        if not is_deterministic(sampling):
            keys.append(bytes(DEDUP_KEY_BYTES))
            continue
        digest = hashlib.blake2b(texts[sampling], digest_size=DEDUP_KEY_BYTES)
        payload = prepared.prompts[row].payload or ""
        digest.update(payload.encode("utf-8", "surrogatepass") + b"\0")
        digest.update(prepared.prompts[row].known_ids.tobytes())
        keys.append(digest.digest())
    return b"".join(keys)


def is_deterministic(sampling: Sampling) -> bool:
    """Return whether equal prompts have equal results with these options."""
    return sampling.temperature == 0


def _read(
    table: pa.Table, reader: PromptReader, config: StageConfig, input_errors: Sequence[str] | None
) -> Sequence[Prompt]:
    errors = [""] * table.num_rows if input_errors is None else list(input_errors)
    for row, num_bytes in large_rows(table, max_bytes=config.max_row_bytes).items():
        errors[row] = errors[row] or (
            f"RowTooLarge: the row has {num_bytes:,} bytes, above max_row_bytes="
            f"{config.max_row_bytes:,}"
        )
    # no rows but a list of errors: columns of the prompts may be missing
    may_lack_columns = input_errors is not None and not errors
    if not any(errors) and not may_lack_columns:
        return reader.read(table)
    good = [table.slice(row, 1) for row, error in enumerate(errors) if not error]
    # without a good row the columns of the prompts may be missing
    prompts = iter(reader.read(pa.concat_tables(good)) if good else ())
    return [Prompt(None, error) if error else next(prompts) for error in errors]


def _checked(
    prompt: Prompt, sampling: Sampling | str, config: StageConfig, max_model_len: int | None
) -> Prompt:
    if isinstance(sampling, str):
        return prompt if prompt.error else prompt._replace(error=sampling)
    if config.task != "generate":
        return fit_pooled(prompt, max_len=max_model_len, on_too_long=config.on_too_long)
    return fit_prompt(
        prompt,
        max_tokens=sampling.max_tokens,
        max_model_len=max_model_len,
        on_too_long=config.on_too_long,
    )


def _changed(sampling: Sampling | str, changes: Mapping[str, Any]) -> Sampling | str:
    """Return options with `changes` applied; an error text if they are incompatible."""
    if isinstance(sampling, str):
        return sampling
    try:
        return replace(sampling, **changes)
    except ConfigError as error:
        return describe_error("InvalidSampling", f"retried with other options: {error}")


def _identify(
    table: pa.Table, config: StageConfig, prompts: Sequence[Prompt]
) -> tuple[list[str], list[Prompt]]:
    contents = _content_row_ids(prompts)
    if config.id_column is None:
        return contents, list(prompts)
    ids, errors = column_row_ids(column_of(table, config.id_column))
    row_ids = [content if i is None else i for i, content in zip(ids, contents, strict=True)]
    return row_ids, [
        prompt._replace(error=error) if error and not prompt.error else prompt
        for prompt, error in zip(prompts, errors, strict=True)
    ]


def _fitting(sampling: Sampling | str, prompt: Prompt, max_model_len: int | None) -> Sampling:
    """Limit the output to the context, so that every backend ends such a row with "length"."""
    assert isinstance(sampling, Sampling), "a row with bad options is not requested"
    if sampling is POOLED:
        return sampling
    room = UNBOUNDED_TOKENS if max_model_len is None else max_model_len - len(prompt.known_ids)
    if sampling.max_tokens <= room:
        return sampling
    return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))


def row_seed(seed: int, row_id: str) -> int:
    """Return the 64-bit seed of a row, from the job's seed and the row's id alone."""
    digest = hashlib.blake2b(f"{seed}\x00{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def column_row_ids(column: pa.ChunkedArray) -> tuple[list[str | None], list[str]]:
    """Return (ids as strings, None if bad; error texts, "" if good) of a user's id column."""
    ids: list[str | None] = []
    errors: list[str] = []
    for value in python_values(column):
        is_bad = value is None or isinstance(value, Exception)
        cause = "the id is null" if value is None else value
        errors.append(describe_error("InvalidRowId", cause) if is_bad else "")
        ids.append(None if is_bad else value.hex() if isinstance(value, bytes) else str(value))
    return ids, errors


def _content_row_ids(prompts: Sequence[Prompt]) -> list[str]:
    """Return ids from the content: a hash of the prompt, and a count of its repetitions.

    They do not depend on order, layout or cluster size, except that the count restarts in every
    row batch: equal prompts in two batches get the same id. `id_column` gives unique ids.
    """
    seen: Counter[str] = Counter()
    ids: list[str] = []
    for prompt in prompts:
        tokens = prompt.token_ids
        content = prompt.error.encode() if tokens is None else tokens.tobytes()
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        ids.append(f"{digest}-{seen[digest]}")
        seen[digest] += 1
    return ids


def fit_prompt(
    prompt: Prompt, *, max_tokens: int, max_model_len: int | None, on_too_long: OnTooLong
) -> Prompt:
    """Return a prompt that leaves room for at least one token: unchanged, cut, or an error.

    A cut leaves room for `max_tokens`, but at least half of the context for the prompt. Tokens
    that the model needs around a text are kept: its begin token, the frame of a chat.
    """
    ids = prompt.token_ids
    if max_model_len is None or ids is None or prompt.error or len(ids) < max_model_len:
        return prompt
    most, excess = _num_cuttable(prompt), len(ids) - max_model_len + 1
    if on_too_long == "drop":
        return prompt._replace(is_filtered=True)
    if on_too_long == "error" or prompt.num_images or most < excess:
        way_out = _WAY_OUT if on_too_long == "error" else _FRAME
        if prompt.num_images:
            way_out = "a prompt with images is never cut; set on_too_long='drop' to drop such rows"
        error = (
            f"PromptTooLong: the prompt has {len(ids)} tokens, no room for an answer in a context "
            f"of {max_model_len}; {way_out}"
        )
        return prompt._replace(error=error)
    room = max(max_model_len - max_tokens, max_model_len // 2, 1)
    return _cut(prompt, min(len(ids) - room, most), on_too_long)


def fit_pooled(prompt: Prompt, *, max_len: int | None, on_too_long: OnTooLong) -> Prompt:
    """Return the prompt of a pooling task, which may fill the context: unchanged, cut or an error.

    Tokens that the tokenizer adds around a text, and the query of a document, are never cut.
    """
    ids = prompt.token_ids
    if max_len is None or ids is None or prompt.error or len(ids) <= max_len:
        return prompt
    border = json.loads(prompt.payload or "{}").get(DOCUMENT_AT, 0)
    excess = len(ids) - border - max_len
    if max(excess, border - max_len) <= 0:
        return prompt
    if on_too_long == "drop":
        return prompt._replace(is_filtered=True)
    if on_too_long == "error" or border > max_len or _num_cuttable(prompt) < excess:
        of_query = "a query is never cut: shorten it, or remove the row"
        error = (
            f"PromptTooLong: {max(len(ids) - border, border)} prompt tokens in a context of "
            f"{max_len}; {of_query if border > max_len else _WAY_OUT}"
        )
        return prompt._replace(error=error)
    return _cut(prompt, excess, on_too_long)


def _num_cuttable(prompt: Prompt) -> int:
    """Return how many tokens may be cut so that one token of the text is left."""
    start, stop = prompt.cuttable or (0, len(prompt.known_ids))
    return stop - start - 1


def _cut(prompt: Prompt, num_tokens: int, on_too_long: OnTooLong) -> Prompt:
    _warn_of_cuts(on_too_long)
    start, stop = prompt.cuttable or (0, len(prompt.known_ids))
    first = start if on_too_long == "truncate_left" else stop - num_tokens
    # the bounds of `cuttable` are no longer valid
    ids = np.delete(prompt.known_ids, slice(first, first + num_tokens))
    return prompt._replace(token_ids=ids, cuttable=None)


@cache
def _warn_of_cuts(on_too_long: OnTooLong) -> None:
    logger.warning(
        "on_too_long=%r cuts prompts that are longer than the context; set on_too_long='error' to "
        "get error rows instead",
        on_too_long,
    )
