"""From results of the pool to the columns of the output: text, reasons and errors per row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from raybatch.actors.wire import decode_completions
from raybatch.errors import RaybatchError
from raybatch.stages.render import Prompt
from raybatch.stages.schema import ERROR_COLUMN, OutputSchema, describe_error
from raybatch.types import Completion, Sampling, TokenIds


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode_batch(
        self, sequences: Sequence[TokenIds], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each sequence."""


class Sample(NamedTuple):
    """One finished sample of a row."""

    text: str | None
    token_ids: TokenIds | None
    finish_reason: str
    error: str = ""
    num_cached_tokens: int | None = None
    logprobs: Any = None
    attempts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What the pool returned for the rows that were asked.

    Args:
        rows: position in the row batch of each request.
        samplings: of each request.
        results: of the pool, in the order of rows and samples.
    """

    rows: Sequence[int]
    samplings: Sequence[Sampling]
    results: pa.Table


def finish_rows(
    user: pa.Table,
    *,
    row_ids: Sequence[str],
    prompts: Sequence[Prompt],
    answers: Answers,
    decoder: Decoder,
    output: OutputSchema,
) -> pa.Table:
    """Return the user's columns with the output columns; every row in has one row out.

    Raises:
        RaybatchError: the pool returned another number of samples than were asked.
    """
    samples = [_unasked(prompt, output.num_samples) for prompt in prompts]
    for row, found in _answered(answers, decoder).items():
        samples[row] = found if len(found) == output.num_samples else found * output.num_samples
    missing = [i for i, found in enumerate(samples) if not found]
    if missing:
        raise RaybatchError(f"the pool returned nothing for {len(missing)} rows of a row batch")
    return output.attach(user, _columns(row_ids, prompts, samples, output))


def _unasked(prompt: Prompt, num_samples: int) -> list[Sample]:
    """Return the samples of a row that no engine saw; none where an answer must come."""
    if prompt.error:
        return [Sample(None, None, "error", prompt.error)] * num_samples
    return [Sample(None, None, "filtered")] * num_samples if prompt.is_filtered else []


def _answered(answers: Answers, decoder: Decoder) -> dict[int, list[Sample]]:
    completions = decode_completions(answers.results)
    attempts = answers.results.column("attempts").to_pylist()
    samplings = [answers.samplings[c.request_id] for c in completions]
    texts = _decode(completions, samplings, decoder)
    found: dict[int, list[Sample]] = {}
    for completion, sampling, text, tries in zip(
        completions, samplings, texts, attempts, strict=True
    ):
        sample = _sample(completion, sampling, text, tries)
        found.setdefault(answers.rows[completion.request_id], []).append(sample)
    for index, row in enumerate(answers.rows):
        got, asked = len(found.get(row, [])), answers.samplings[index].n
        if got != asked and not (got == 1 and found[row][0].error):
            raise RaybatchError(f"the pool returned {got} samples of a row, {asked} were asked")
    return found


def _sample(
    completion: Completion, sampling: Sampling, text: str | Exception, attempts: int
) -> Sample:
    error, reason = completion.error, completion.finish_reason
    if not error and reason == "capacity":
        error = "CapacityError: prompt and output cannot fit the cache even alone"
    if not error and isinstance(text, Exception):
        error = describe_error("DetokenizeError", text)
    if error:
        return Sample(None, completion.token_ids, "error", error, attempts=attempts)
    shown = str(text)
    if completion.text is None and sampling.stop:
        shown, is_cut = cut_at_stop(shown, sampling, completion.stop_reason)
        reason = "stop" if is_cut else reason
    return Sample(
        text=shown,
        token_ids=completion.token_ids,
        finish_reason=reason,
        num_cached_tokens=completion.num_cached_tokens,
        logprobs=completion.logprobs,
        attempts=attempts,
    )


def cut_at_stop(text: str, sampling: Sampling, stop_reason: str | int | None) -> tuple[str, bool]:
    """Return the text up to its stop string, and whether there was one.

    Before `min_tokens` a stop string is text like any other: then only the one that ended the
    sequence counts, which is the last.
    """
    if sampling.min_tokens:
        stops = [stop_reason] if isinstance(stop_reason, str) else []
        hits = [(text.rfind(stop), stop) for stop in stops if stop in text]
    else:
        hits = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
    if not hits:
        return text, False
    start, stop = min(hits)
    return text[: start + len(stop) if sampling.include_stop_str_in_output else start], True


def _decode(
    completions: Sequence[Completion], samplings: Sequence[Sampling], decoder: Decoder
) -> list[str | Exception]:
    texts: list[str | Exception] = [c.text or "" for c in completions]
    for is_skipping in (True, False):
        indexes = [
            i
            for i, (c, s) in enumerate(zip(completions, samplings, strict=True))
            if c.text is None and not c.error and s.skip_special_tokens is is_skipping
        ]
        sequences = [completions[i].token_ids for i in indexes]
        decoded = _decode_each(decoder, sequences, skip_special_tokens=is_skipping)
        for i, text in zip(indexes, decoded, strict=True):
            texts[i] = text
    return texts


def _decode_each(
    decoder: Decoder, sequences: Sequence[TokenIds], *, skip_special_tokens: bool
) -> Sequence[str | Exception]:
    """Decode at once; one by one only where that fails, so that one bad row stays one."""
    if not sequences:
        return []
    try:
        return decoder.decode_batch(sequences, skip_special_tokens=skip_special_tokens)
    except Exception as error:  # a tokenizer may raise anything for ids it does not know
        if len(sequences) == 1:
            return [error]
    return [
        text
        for sequence in sequences
        for text in _decode_each(decoder, [sequence], skip_special_tokens=skip_special_tokens)
    ]


def _columns(
    row_ids: Sequence[str],
    prompts: Sequence[Prompt],
    samples: Sequence[Sequence[Sample]],
    output: OutputSchema,
) -> dict[str, list[Any]]:
    def per_sample(values: Sequence[Sequence[Any]]) -> list[Any]:
        return [list(v) if output.num_samples > 1 else v[0] for v in values]

    columns: dict[str, list[Any]] = {
        "row_id": list(row_ids),
        "generated_text": per_sample([[s.text for s in row] for row in samples]),
        "generated_tokens": per_sample([[s.token_ids for s in row] for row in samples]),
        "num_input_tokens": [None if p.token_ids is None else len(p.token_ids) for p in prompts],
        "num_generated_tokens": per_sample([[_length(s) for s in row] for row in samples]),
        "num_cached_tokens": [row[0].num_cached_tokens or 0 for row in samples],
        "finish_reason": per_sample([[s.finish_reason for s in row] for row in samples]),
        "group_id": [None] * len(samples),
        "attempts": [max(s.attempts for s in row) for row in samples],
        ERROR_COLUMN: [next((s.error for s in row if s.error), "") for row in samples],
    }
    if output.has_logprobs:
        columns["logprobs"] = per_sample([[_logprobs(s.logprobs) for s in row] for row in samples])
    return columns


def _length(sample: Sample) -> int:
    return 0 if sample.token_ids is None else len(sample.token_ids)


def _logprobs(values: Any) -> list[dict[str, Any]] | None:  # noqa: ANN401
    if values is None:
        return None
    return [{"token_ids": ids, "logprobs": logs} for ids, logs in values]
