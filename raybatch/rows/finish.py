"""From results of the pool to the columns of the output: text, reasons and errors per row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from raybatch.actors.wire.columns import decode_completions, vector_lists
from raybatch.errors import RaybatchError
from raybatch.records.parsed_text import ParsedText
from raybatch.records.types import Completion, Sampling, TokenIds, Vector
from raybatch.rows.prompt import Prompt
from raybatch.rows.schema import ERROR_COLUMN, NUMBERS, OutputSchema, describe_error
from raybatch.text.prompt_tokenizer import PromptTokenizer
from raybatch.text.stopping import completion_text, visible_token_ids

_T = TypeVar("_T")


class Sample(NamedTuple):
    """One finished sample of a row.

    Args:
        num_input_tokens: as the backend counts the prompt; None where that is the stage's count.
        num_generated_tokens: as the backend counts; None where `token_ids` says it.
    """

    text: str | None
    token_ids: TokenIds | None
    finish_reason: str
    error: str = ""
    num_cached_tokens: int | None = None
    logprobs: Any = None
    attempts: int = 0
    num_input_tokens: int | None = None
    num_generated_tokens: int | None = None
    vector: Vector | None = None
    parsed: ParsedText | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredRows:
    """Rows of one row batch with what the pool returned for them.

    Args:
        table: the user's columns alone.
        group_ids: prefix group of each row; None where nothing is planned.
        rows: position of each request's row among these.
        copies: row to the earlier row whose result it takes.
        results: of the pool, in the order of requests and samples.
    """

    table: pa.Table
    row_ids: Sequence[str]
    prompts: Sequence[Prompt]
    group_ids: Sequence[int | None] | None = None
    rows: Sequence[int]
    copies: Mapping[int, int]
    samplings: Sequence[Sampling]
    results: pa.Table


def finish_rows(
    answered: AnsweredRows, *, tokenizer: PromptTokenizer, output: OutputSchema
) -> pa.Table:
    """Return the user's columns with the output columns; every row in has one row out.

    A copy counts all tokens of its prompt as cached.

    Raises:
        RaybatchError: the pool returned another number of samples than requested.
    """
    prompts = answered.prompts
    samples = [_unasked(prompt, output.num_samples) for prompt in prompts]
    for row, returned in _samples(answered, tokenizer).items():
        # an error stands for all samples
        is_all = len(returned) == output.num_samples
        samples[row] = returned if is_all else returned * output.num_samples
    for row, original in answered.copies.items():
        samples[row] = _copied(samples[original], prompts[row])
    missing = [row for row, of_row in enumerate(samples) if not of_row]
    if missing:
        raise RaybatchError(f"the pool returned nothing for {len(missing)} rows of a row batch")
    columns = _columns(answered.row_ids, prompts, samples, output)
    group_ids = answered.group_ids
    columns["group_id"] = [None] * len(samples) if group_ids is None else list(group_ids)
    return output.attach(answered.table, columns)


def _copied(samples: Sequence[Sample], prompt: Prompt) -> list[Sample]:
    """Return the samples of a row for another one with the same prompt and options."""
    first, *others = samples
    return [first._replace(num_cached_tokens=_num_input(prompt, samples) or 0), *others]


def _unasked(prompt: Prompt, num_samples: int) -> list[Sample]:
    """Return the samples of a row that no engine saw; none where an answer must come."""
    if prompt.error:
        return [Sample(None, None, "error", prompt.error)] * num_samples
    return [Sample(None, None, "filtered")] * num_samples if prompt.is_filtered else []


def _samples(answered: AnsweredRows, tokenizer: PromptTokenizer) -> dict[int, list[Sample]]:
    """Return the samples of each row that was requested."""
    completions = decode_completions(answered.results)
    attempts = answered.results.column("attempts").to_pylist()
    samplings = [answered.samplings[c.request_id] for c in completions]
    texts = _decode(completions, samplings, tokenizer)
    samples: dict[int, list[Sample]] = {row: [] for row in answered.rows}
    for completion, text, tries in zip(completions, texts, attempts, strict=True):
        samples[answered.rows[completion.request_id]].append(_sample(completion, text, tries))
    for of_row, sampling in zip(samples.values(), answered.samplings, strict=True):
        num, wanted = len(of_row), sampling.n
        if num != wanted and not (num == 1 and of_row[0].error):
            raise RaybatchError(f"the pool returned {num} samples of a row, {wanted} were asked")
    return samples


def _sample(completion: Completion, text: str | Exception, attempts: int) -> Sample:
    error = completion.error
    reason = "capacity" if completion.finish_reason == "capacity" else "error"
    if not error and reason == "capacity":
        error = (
            "CapacityError: prompt and output cannot fit the KV cache even alone; raise "
            "engine.kv_cache_bytes"
        )
    if not error and isinstance(text, Exception):
        error = describe_error("DetokenizeError", text)
    if error:
        return Sample(None, completion.token_ids, reason, error, attempts=attempts)
    return Sample(
        text=str(text),
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        num_cached_tokens=completion.num_cached_tokens,
        logprobs=completion.logprobs,
        attempts=attempts,
        num_input_tokens=completion.num_input_tokens,
        num_generated_tokens=completion.num_generated_tokens,
        vector=completion.vector,
        parsed=completion.parsed or ParsedText(),
    )


def _decode(
    completions: Sequence[Completion], samplings: Sequence[Sampling], tokenizer: PromptTokenizer
) -> list[str | Exception]:
    """Return the visible text of each completion, or what kept it from being text."""
    texts: list[str | Exception] = [c.text or "" for c in completions]
    plain: dict[bool, list[int]] = {True: [], False: []}
    for i, (completion, sampling) in enumerate(zip(completions, samplings, strict=True)):
        if completion.text is not None or completion.error or completion.vector is not None:
            continue
        if isinstance(completion.stop_reason, str):
            texts[i] = _or_error(partial(completion_text, completion, sampling, tokenizer))
        else:
            plain[sampling.skip_special_tokens].append(i)
    for is_skipping, indexes in plain.items():
        sequences = [visible_token_ids(completions[i], samplings[i]) for i in indexes]
        for i, text in zip(indexes, _decode_each(tokenizer, sequences, is_skipping), strict=True):
            texts[i] = text
    return texts


def _decode_each(
    tokenizer: PromptTokenizer, sequences: Sequence[TokenIds], is_skipping: bool
) -> Sequence[str | Exception]:
    """Decode at once; one by one only where that fails, so that one bad row stays one."""
    decoded = _or_error(partial(tokenizer.decode_batch, sequences, is_skipping))
    if not isinstance(decoded, Exception):
        return decoded
    return [_or_error(partial(tokenizer.decode, ids, is_skipping)) for ids in sequences]


def _or_error(make: Callable[[], _T]) -> _T | Exception:
    try:
        return make()
    except Exception as error:  # a tokenizer may raise anything for ids it does not know
        return error


def _columns(
    row_ids: Sequence[str],
    prompts: Sequence[Prompt],
    samples: Sequence[Sequence[Sample]],
    output: OutputSchema,
) -> dict[str, Any]:
    def per_sample(value_of: Callable[[Sample], Any]) -> list[Any]:
        if output.num_samples == 1:
            return [value_of(row[0]) for row in samples]
        return [[value_of(sample) for sample in row] for row in samples]

    columns: dict[str, Any] = {
        "row_id": list(row_ids),
        "generated_text": per_sample(lambda s: s.text),
        "generated_tokens": per_sample(lambda s: s.token_ids),
        "num_input_tokens": [_num_input(p, row) for p, row in zip(prompts, samples, strict=True)],
        "num_generated_tokens": per_sample(_num_generated),
        "num_cached_tokens": [row[0].num_cached_tokens or 0 for row in samples],
        "finish_reason": per_sample(lambda s: s.finish_reason),
        "attempts": [max(s.attempts for s in row) for row in samples],
        ERROR_COLUMN: [next((s.error for s in row if s.error), "") for row in samples],
    }
    if output.task != "generate":
        columns |= _numbers([row[0].vector for row in samples], output)
    if output.has_logprobs:
        columns["logprobs"] = per_sample(_logprobs)
    for name in output.parsed:
        columns[name] = per_sample(partial(_parsed, name))
    return columns


def _num_input(prompt: Prompt, samples: Sequence[Sample]) -> int | None:
    if samples[0].num_input_tokens is not None:
        return samples[0].num_input_tokens
    return None if prompt.token_ids is None else len(prompt.token_ids)


def _numbers(vectors: Sequence[Vector | None], output: OutputSchema) -> dict[str, Any]:
    name, kind = NUMBERS[output.task]
    if output.task == "score":
        return {name: [None if vector is None else vector[0] for vector in vectors]}
    return {name: vector_lists(vectors).cast(kind)}


def _num_generated(sample: Sample) -> int:
    if sample.num_generated_tokens is not None:
        return sample.num_generated_tokens
    return 0 if sample.token_ids is None else len(sample.token_ids)


def _logprobs(sample: Sample) -> list[dict[str, Any]] | None:
    if sample.logprobs is None:
        return None
    return [{"token_ids": ids, "logprobs": logs} for ids, logs in sample.logprobs]


def _parsed(name: str, sample: Sample) -> Any:  # noqa: ANN401
    return None if sample.parsed is None else sample.parsed.columns()[name]
