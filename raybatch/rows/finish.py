"""Turns results of the pool into output columns: text, finish reason and error per row."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from raybatch.actors.wire.columns import decode_completions, vector_lists
from raybatch.backends.endpoint import PromptTokenizer
from raybatch.errors import RaybatchError
from raybatch.records.parsed_text import ParsedText
from raybatch.records.types import Completion, Sampling, TokenIds
from raybatch.rows.prepare import Prepared
from raybatch.rows.schema import (
    ERROR_COLUMN,
    NUMBERS,
    PARSED,
    PARSED_ERROR,
    OutputSchema,
    describe_error,
)
from raybatch.text.detokenizer import completion_text, visible_token_ids
from raybatch.text.json_schemas import wrong_with
from raybatch.text.tokenizer import Prompt
from raybatch.text.typed_answers import AnswerType, read_answer

_T = TypeVar("_T")


class RowSample(NamedTuple):
    """One finished sample of a row; without an answer if it failed or was skipped."""

    text: str | None
    token_ids: TokenIds | None
    finish_reason: str
    error: str = ""
    attempts: int = 0
    num_cached_tokens: int = 0
    answer: Completion | None = None


def finish_rows(
    prepared: Prepared,
    results: pa.Table,
    *,
    tokenizer: PromptTokenizer,
    output: OutputSchema,
    checks_answers: bool = True,
) -> pa.Table:
    """Return the user's columns with the output columns, a row for each row of the batch.

    A row that duplicates an earlier one counts all tokens of its prompt as cached. `results` are
    in the order of requests and samples; another number of samples than requested is a
    RaybatchError. With `checks_answers`, answers that violate their JSON schema become errors that
    keep their text.
    """
    prompts = prepared.prompts
    samples = [_skipped(prompt) * output.num_samples for prompt in prompts]
    requested = _samples(prepared, results, tokenizer, checks_answers=checks_answers)
    for row, returned in requested.items():
        # one error sample stands for all samples of a row
        is_all = len(returned) == output.num_samples
        samples[row] = returned if is_all else returned * output.num_samples
    for row, original in prepared.copies.items():
        first, *others = samples[original]
        num_cached = _num_input(prompts[row], first) or 0
        samples[row] = [first._replace(num_cached_tokens=num_cached), *others]
    missing = [row for row, of_row in enumerate(samples) if not of_row]
    if missing:
        raise RaybatchError(f"the engines returned nothing for {len(missing)} rows of a row batch")
    num_input = [_num_input(p, row[0]) for p, row in zip(prompts, samples, strict=True)]
    columns = answer_columns(prepared.row_ids, num_input, samples, output)
    columns["group_id"] = prepared.group_ids or [None] * len(samples)
    return output.attach(prepared.table, columns)


def _skipped(prompt: Prompt) -> list[RowSample]:
    """Return the sample of a row that no engine gets; none for a requested row."""
    if prompt.error:
        return [RowSample(None, None, "error", prompt.error)]
    return [RowSample(None, None, "filtered")] if prompt.is_filtered else []


def _samples(
    prepared: Prepared, results: pa.Table, tokenizer: PromptTokenizer, *, checks_answers: bool
) -> dict[int, list[RowSample]]:
    """Return the samples of each row that was requested."""
    completions = decode_completions(results)
    attempts = results.column("attempts").to_pylist()
    samplings = [prepared.request_samplings[c.request_id] for c in completions]
    prompts = [prepared.prompts[prepared.rows[c.request_id]].known_ids for c in completions]
    texts = _decode(completions, samplings, prompts, tokenizer)
    samples: dict[int, list[RowSample]] = {row: [] for row in prepared.rows}
    for completion, text, tries in zip(completions, texts, attempts, strict=True):
        sample = _sample(completion, text, tries)
        constraint = prepared.request_samplings[completion.request_id].structured_outputs
        if checks_answers and isinstance(constraint, str):
            sample = _checked(sample, constraint)
        samples[prepared.rows[completion.request_id]].append(sample)
    for of_row, sampling in zip(samples.values(), prepared.request_samplings, strict=True):
        num, wanted = len(of_row), sampling.n
        if num != wanted and not (num == 1 and of_row[0].error):
            raise RaybatchError(
                f"the backend returned {num} completions for a row with sampling.n={wanted}"
            )
    return samples


def _sample(completion: Completion, text: str | Exception, attempts: int) -> RowSample:
    is_full = completion.finish_reason == "capacity"
    error = completion.error
    if not error and is_full:
        error = (
            "CapacityError: prompt and output do not fit the KV cache; raise "
            "engine.kv_cache_bytes, with kv_offload also host_kv_bytes, or lower max_tokens"
        )
    if not error and isinstance(text, Exception):
        error = describe_error("DetokenizeError", text)
    if error:
        reason = "capacity" if is_full else "error"
        # a copy of a failed row counts its whole prompt as cached
        num_cached = completion.num_cached_tokens if completion.error else 0
        return RowSample(None, completion.token_ids, reason, error, attempts, num_cached)
    return RowSample(
        text=str(text),
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        attempts=attempts,
        num_cached_tokens=completion.num_cached_tokens,
        answer=completion,
    )


def _checked(sample: RowSample, constraint: str) -> RowSample:
    """Return the sample, with an error if a complete answer violates its schema."""
    parsed = sample.answer and sample.answer.parsed
    if sample.text is None or sample.finish_reason != "stop" or (parsed and parsed.tool_calls):
        return sample
    wrong = wrong_with(sample.text, constraint)
    return sample._replace(error=f"InvalidAnswer: {wrong}") if wrong else sample


def _decode(
    completions: Sequence[Completion],
    samplings: Sequence[Sampling],
    prompts: Sequence[TokenIds],
    tokenizer: PromptTokenizer,
) -> list[str | Exception]:
    """Return the visible text of each completion, or the exception of decoding it."""
    texts: list[str | Exception] = [c.text or "" for c in completions]
    plain: dict[bool, list[int]] = {True: [], False: []}
    for i, (completion, sampling) in enumerate(zip(completions, samplings, strict=True)):
        if completion.text is not None or completion.error or completion.vector is not None:
            continue
        if isinstance(completion.stop_reason, str):
            make = partial(completion_text, completion, sampling, tokenizer, prompts[i])
            texts[i] = _or_error(make)
        else:
            plain[sampling.skip_special_tokens].append(i)
    for is_skipping, indexes in plain.items():
        sequences = [visible_token_ids(completions[i], samplings[i]) for i in indexes]
        before = [prompts[i] for i in indexes]
        # decode as a batch; only if that fails one by one, so that one bad row fails alone
        decoded: Sequence[str | Exception] | Exception
        decoded = _or_error(partial(tokenizer.decode_batch, sequences, is_skipping, after=before))
        if isinstance(decoded, Exception):
            one = partial(tokenizer.decode, skip_special_tokens=is_skipping)
            pairs = zip(sequences, before, strict=True)
            decoded = [_or_error(partial(one, ids, after=prompt)) for ids, prompt in pairs]
        for i, text in zip(indexes, decoded, strict=True):
            texts[i] = text
    return texts


def _or_error(make: Callable[[], _T]) -> _T | Exception:
    try:
        return make()
    except Exception as error:  # a tokenizer may raise any error for unknown ids
        return error


def answer_columns(
    row_ids: Sequence[str],
    num_input_tokens: Sequence[int | None],
    samples: Sequence[Sequence[RowSample]],
    output: OutputSchema,
) -> dict[str, Any]:
    """Return the output columns except `group_id`; each row has `output.num_samples` samples."""

    def per_sample(value_of: Callable[[RowSample], Any]) -> list[Any]:
        if output.num_samples == 1:
            return [value_of(row[0]) for row in samples]
        return [[value_of(sample) for sample in row] for row in samples]

    firsts = [row[0] for row in samples]
    vectors = [None if first.answer is None else first.answer.vector for first in firsts]
    columns: dict[str, Any] = {
        "row_id": list(row_ids),
        "generated_text": per_sample(lambda s: s.text),
        "generated_tokens": per_sample(lambda s: s.token_ids),
        "num_input_tokens": num_input_tokens,
        "num_generated_tokens": per_sample(_num_generated),
        "num_cached_tokens": [first.num_cached_tokens for first in firsts],
        "finish_reason": per_sample(lambda s: s.finish_reason),
        "attempts": [max(s.attempts for s in row) for row in samples],
        ERROR_COLUMN: [next((s.error for s in row if s.error), "") for row in samples],
    }
    if output.task == "score":
        columns["score"] = [None if vector is None else vector[0] for vector in vectors]
    elif output.task != "generate":
        name, kind = NUMBERS[output.task]
        columns[name] = vector_lists(vectors).cast(kind)
    if output.has_logprobs:
        columns["logprobs"] = per_sample(_logprobs)
    for name in output.parsed:
        columns[name] = per_sample(partial(_parsed, name))
    if (kind := output.answer_type) is not None:
        values = {id(s): _typed(s, kind) for row in samples for s in row}
        columns[PARSED] = per_sample(lambda s: values[id(s)][0])
        columns[PARSED_ERROR] = per_sample(lambda s: values[id(s)][1])
    return columns


def _typed(sample: RowSample, kind: AnswerType) -> tuple[Any, str | None]:
    """Return the value of an answer, and why it has none; neither where there is no answer."""
    if sample.text is None or sample.error:
        return None, None
    value, error = read_answer(sample.text, kind)
    return value, error or None


def _num_input(prompt: Prompt, sample: RowSample) -> int | None:
    if sample.answer is not None and sample.answer.num_input_tokens is not None:
        return sample.answer.num_input_tokens
    return None if prompt.token_ids is None else len(prompt.token_ids)


def _num_generated(sample: RowSample) -> int:
    if sample.answer is not None and sample.answer.num_generated_tokens is not None:
        return sample.answer.num_generated_tokens
    return 0 if sample.token_ids is None else len(sample.token_ids)


def _logprobs(sample: RowSample) -> list[dict[str, Any]] | None:
    if sample.answer is None or sample.answer.logprobs is None:
        return None
    return [{"token_ids": ids, "logprobs": logs} for ids, logs in sample.answer.logprobs]


def _parsed(name: str, sample: RowSample) -> Any:  # noqa: ANN401
    return sample.answer and (sample.answer.parsed or ParsedText()).columns()[name]
