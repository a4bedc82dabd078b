"""Draw one token per row by inverting the cumulative probability at a random number in [0, 1).

A random number depends on its sequence and position alone, so preemption and migration change
none. Every result is a function of its own row: the same logits, options and number give the same
token in any batch. Rows are worked on in runs that fit the cache; candidates are held in float64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from raybatch.kernels.sampling import block_sums, invert, weights_of
from raybatch.records.arrays import Floats, Ints, Uint64s
from raybatch.records.hashing import GOLDEN, mix64

# entries of one run of rows: 4 MiB of float32 stays in a CPU's cache, a GPU wants long runs
_RUN_ENTRIES_CPU = 1 << 20
_RUN_ENTRIES_GPU = 1 << 27
_WIDTHS = (64, 1024)  # candidates tried before the whole vocabulary is sorted

_MASK = (1 << 64) - 1


class DrawOptions(NamedTuple):
    """Options and random numbers of S rows; `top_k` is V where there is none."""

    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    uniform: Floats

    def take(self, rows: Ints) -> "DrawOptions":
        return DrawOptions._make(column[rows] for column in self)


class Drawn(NamedTuple):
    """Token ids int64 [S], and the largest logit of each row: not finite for a broken row."""

    token_ids: torch.Tensor
    max_logits: torch.Tensor


class DrawnTokens(NamedTuple):
    """Token ids int64 [S], 0 for a row that is not finite, and bool [S]; on the device."""

    token_ids: torch.Tensor
    is_finite: torch.Tensor


def draw_greedy(logits: torch.Tensor, rows: Ints, _: DrawOptions | None = None) -> Drawn:
    """Return the most likely token of each row of `logits` [N, V] named in `rows`."""
    ids, values = [], []
    for _span, run in _runs(logits, rows):
        winners = _first_max(run)
        ids.append(winners)
        # argmax takes a NaN for the largest value, so the winner shows whether the row is sound
        values.append(run.gather(1, winners[:, None])[:, 0])
    return Drawn(token_ids=torch.cat(ids), max_logits=torch.cat(values))


def draw_dense(logits: torch.Tensor, rows: Ints, options: DrawOptions) -> Drawn:
    """Draw from the whole vocabulary in the order of token ids; min_p is the only filter."""
    ids, values = [], []
    for span, run in _runs(logits, rows):
        max_logit = run.amax(dim=-1, keepdim=True)
        weights = weights_of(run, max_logit, _column(options.temperature[span], run))
        min_p = options.min_p[span]
        if min_p.any():
            weights.masked_fill_(weights < _column(min_p, run, torch.float32), 0.0)
        ids.append(invert(weights, _column(options.uniform[span], run)))
        values.append(max_logit[:, 0])
    return Drawn(token_ids=torch.cat(ids), max_logits=torch.cat(values))


def draw_ranked(logits: torch.Tensor, rows: Ints, options: DrawOptions) -> Drawn:
    """Draw from the most likely tokens, in falling order, where top_k or top_p cut the rest.

    The host reads which rows are settled, and so waits for a GPU.

    A few candidates settle almost every row. A row is settled only when its last kept token lies
    strictly above the last candidate: then no equal logit outside the candidates was left out,
    and the outcome is that of a full stable sort.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    ids = np.zeros(num_rows, np.int64)
    max_logits = np.zeros(num_rows, np.float32)
    pending = np.arange(num_rows)
    for width in (*_WIDTHS, vocab_size):
        is_last = width >= vocab_size
        fits = is_last | (options.top_k[pending] < width) | (options.top_k[pending] == vocab_size)
        tried = pending[fits]
        if len(tried):
            drawn, is_settled = _draw_candidates(
                logits, rows[tried], options.take(tried), min(width, vocab_size)
            )
            ids[tried] = _numpy(drawn.token_ids)
            max_logits[tried] = _numpy(drawn.max_logits)
            # a broken row has no order; it is reported, not tried again
            is_settled |= ~np.isfinite(max_logits[tried])
            pending = np.concatenate([pending[~fits], tried[~is_settled]])
        if is_last or not len(pending):
            break
    return Drawn._make(torch.from_numpy(made).to(logits.device) for made in (ids, max_logits))


def _draw_candidates(
    logits: torch.Tensor, rows: Ints, options: DrawOptions, width: int
) -> tuple[Drawn, npt.NDArray[np.bool_]]:
    ids, settled, max_logits = [], [], []
    for span, run in _runs(logits, rows):
        values = _largest(run, width)
        choice, is_settled = _pick(run, values, options, span)
        ids.append(_find_ranked(run, values, choice))
        settled.append(is_settled)
        max_logits.append(values[:, 0])
    drawn = Drawn(token_ids=torch.cat(ids), max_logits=torch.cat(max_logits))
    return drawn, _numpy(torch.cat(settled))


def _largest(run: torch.Tensor, width: int) -> torch.Tensor:
    """Return the `width` largest logits of each row, falling; a NaN comes first."""
    if not run.is_cpu:
        return run.topk(width, dim=-1).values
    # numpy orders values alone with the CPU's vector units, several times as fast as torch
    values = run.numpy()
    if width < run.shape[1]:
        values = np.partition(values, run.shape[1] - width, axis=-1)[:, -width:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _pick(
    run: torch.Tensor,  # [S, V]
    values: torch.Tensor,  # [S, C] falling
    options: DrawOptions,
    span: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a column of `values` per row, and whether these candidates are enough to know it."""
    width, vocab_size = values.shape[1], run.shape[1]
    has_top_k_host = options.top_k[span] < vocab_size
    has_top_k = torch.from_numpy(has_top_k_host).to(run.device)[:, None]
    top_k = torch.from_numpy(np.minimum(options.top_k[span], width)).to(run.device)[:, None]
    temperature = _column(options.temperature[span], run)
    max_logit = values[:, :1]
    weights = ((values - max_logit).double() / temperature).exp()
    cumulative = weights.cumsum(dim=-1)
    smallest = values.gather(1, top_k - 1)
    in_top_k = values >= smallest
    total = (weights * in_top_k).sum(dim=-1, keepdim=True)
    if width < vocab_size and not has_top_k_host.all():
        mass = block_sums(weights_of(run, max_logit, temperature)).sum(dim=-1, keepdim=True)
        total = torch.where(has_top_k, total, mass)
    is_kept = in_top_k & (cumulative - weights < _column(options.top_p[span], run) * total)
    is_kept &= weights >= _column(options.min_p[span], run)
    is_kept[:, 0] = True
    last = is_kept.sum(dim=-1, keepdim=True) - 1
    target = _column(options.uniform[span], run) * cumulative.gather(1, last)
    choice = torch.minimum((cumulative <= target).sum(dim=-1, keepdim=True), last)
    boundary = values[:, -1:]
    is_settled = values.gather(1, last) > boundary
    is_settled &= ~has_top_k | (smallest > boundary)
    return choice, is_settled[:, 0] | (width == vocab_size)


def _find_ranked(
    run: torch.Tensor,  # [S, V]
    values: torch.Tensor,  # [S, C] falling
    choice: torch.Tensor,  # [S, 1]
) -> torch.Tensor:
    """Return the token ids of the chosen ranks; equal logits rank in the order of their ids."""
    chosen = values.gather(1, choice)
    num_equal_before = choice - (values > chosen).sum(dim=-1, keepdim=True)
    is_equal = _equal(run, chosen)
    token_ids = _first_max(is_equal)
    tied = num_equal_before[:, 0].nonzero()[:, 0]
    if len(tied):
        occurrence = is_equal[tied].cumsum(dim=-1, dtype=torch.int32)
        is_wanted = is_equal[tied] & (occurrence == num_equal_before[tied] + 1)
        token_ids[tied] = _first_max(is_wanted)
    return token_ids


def _equal(run: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return run == chosen if not run.is_cpu else torch.from_numpy(run.numpy() == chosen.numpy())


def _first_max(values: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest values, or of the flags that are set, of each row."""
    if not values.is_cpu:
        return (values.int() if values.dtype == torch.bool else values).argmax(dim=-1)
    # numpy's search uses the CPU's vector units, torch's does not
    return torch.from_numpy(values.numpy().argmax(axis=-1))


def _runs(logits: torch.Tensor, rows: Ints) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield runs of `rows` with their logits; views where the rows are all rows in order."""
    entries = _RUN_ENTRIES_CPU if logits.is_cpu else _RUN_ENTRIES_GPU
    length = max(1, entries // logits.shape[1])
    is_all = len(rows) == logits.shape[0] and bool((np.diff(rows) == 1).all())
    for start in range(0, len(rows), length):
        span = slice(start, min(start + length, len(rows)))
        if is_all:
            yield span, logits[span]
        else:
            yield span, logits.index_select(0, torch.from_numpy(rows[span]).to(logits.device))


def _column(values: Floats, like: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, dtype)[:, None]


def _numpy(values: torch.Tensor) -> npt.NDArray[Any]:
    return values.cpu().numpy()


def sequence_key(seed: int, sample_idx: int) -> int:
    """Return the 64-bit key of one sample of one request."""
    words = np.array([seed & _MASK, sample_idx & _MASK], np.uint64)
    first = mix64(words[:1] + GOLDEN)
    return int(mix64(first ^ (words[1:] * GOLDEN + np.uint64(1)))[0])


def uniforms(keys: Uint64s, positions: Ints) -> Floats:
    """Return one number in [0, 1) with 53 random bits for each pair of key and position."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    bits = mix64(mix64(keys + counters)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
