"""Draw one token per row by inverting the cumulative probability at a random number in [0, 1).

A random number depends only on sequence and position, so preemption and migration do not change
it. Every result depends only on its own row: equal logits, options and number give the same token
in any batch. Rows are processed in runs that fit the CPU cache; candidates are float64. On a GPU
the host reads nothing back.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from raybatch.errors import error_text
from raybatch.kernels.dispatch import ranks_on_gpu
from raybatch.kernels.sampling import Limits, block_sums, invert, weights_of
from raybatch.records.arrays import GOLDEN, Floats, Ints, Uint64s, mix64

_logger = logging.getLogger(__name__)

# entries of one run of rows: 4 MiB of float32 fits a CPU's cache; a GPU needs long runs
_RUN_ENTRIES_CPU = 1 << 20
_RUN_ENTRIES_GPU = 1 << 27
_WIDTHS = (64, 1024)  # candidates tried before the whole vocabulary is sorted

_MASK = (1 << 64) - 1


class DrawOptions(NamedTuple):
    """Sampling options and one random number in [0, 1) for each of S rows.

    `top_k` is the vocabulary size V where it is not set.
    """

    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    uniform: Floats

    def take(self, rows: Ints) -> "DrawOptions":
        return DrawOptions._make(column[rows] for column in self)

    def table(self, rows: Ints) -> Ints:
        """Return row indices and options in one array, int64 [6, S]; floats keep their bits."""
        columns = (rows, *self)
        return np.stack([np.ascontiguousarray(column).view(np.int64) for column in columns])


class Drawn(NamedTuple):
    """Token ids int64 [S], and the largest logit of each row: not finite for a broken row."""

    token_ids: torch.Tensor
    max_logits: torch.Tensor


class DrawnTokens(NamedTuple):
    """Token ids int64 [S], 0 for a non-finite row, and is-finite bool [S]; on the device."""

    token_ids: torch.Tensor
    is_finite: torch.Tensor


def draw_greedy(
    logits: torch.Tensor,
    rows: Ints,
    options: DrawOptions | None = None,
    table: torch.Tensor | None = None,
) -> Drawn:
    """Return the most likely token of each row of `logits` [N, V] whose index is in `rows`.

    In all draw functions, `table` is the result of `DrawOptions.table` if it is on the device
    already; it may have more columns than needed.
    """
    ids, values = [], []
    for _span, run in _runs(logits, rows, table):
        winners = _first_max(run)
        ids.append(winners)
        # argmax treats NaN as the largest value, so the winner shows whether the row is finite
        values.append(run.gather(1, winners[:, None])[:, 0])
    return Drawn(token_ids=torch.cat(ids), max_logits=torch.cat(values))


def draw_dense(
    logits: torch.Tensor, rows: Ints, options: DrawOptions, table: torch.Tensor | None = None
) -> Drawn:
    """Draw one token per row from the whole vocabulary, in order of ids; only min_p filters."""
    ids, values = [], []
    all_limits, table = _placed(logits, rows, options, table)
    for span, run in _runs(logits, rows, table):
        limits = all_limits.take(span)
        max_logit = run.amax(dim=-1, keepdim=True)
        weights = weights_of(run, max_logit, limits.temperature)
        if options.min_p[span].any():
            weights.masked_fill_(weights < limits.min_p.float(), 0.0)
        ids.append(invert(weights, limits.uniform))
        values.append(max_logit[:, 0])
    return Drawn(token_ids=torch.cat(ids), max_logits=torch.cat(values))


def draw_ranked(
    logits: torch.Tensor, rows: Ints, options: DrawOptions, table: torch.Tensor | None = None
) -> Drawn:
    """Draw one token per row from the most likely ones, in descending order, under top_k or top_p.

    Almost every row is drawn from a few candidates with the largest logits, without sorting the
    vocabulary. That is allowed only if the last token that the filters keep is strictly above the
    last candidate: then no equal logit is outside of the candidates, and the result is that of a
    full stable sort. Such a row is settled; other rows try more candidates.
    """
    if not logits.is_cpu:
        return draw_ranked_ahead(
            logits, rows, options, table, find_ranks=_agreed_ranks(logits.device)
        )
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
            ids[tried] = drawn.token_ids.numpy()
            max_logits[tried] = drawn.max_logits.numpy()
            # a non-finite row has no order; it is reported, not retried
            is_settled |= ~np.isfinite(max_logits[tried])
            pending = np.concatenate([pending[~fits], tried[~is_settled]])
        if is_last or not len(pending):
            break
    return Drawn(torch.from_numpy(ids), torch.from_numpy(max_logits))


def draw_ranked_ahead(
    logits: torch.Tensor,
    rows: Ints,
    options: DrawOptions,
    table: torch.Tensor | None = None,
    *,
    find_ranks: Callable[..., torch.Tensor] | None,
) -> Drawn:
    """Draw as `draw_ranked` does, with launches that depend on no values (no host sync).

    `find_ranks` is a kernel that returns token ids, and draws the rows that are not settled; None:
    all rows are sorted in full.
    """
    ids, max_logits = [], []
    vocab_size = logits.shape[1]
    all_limits, table = _placed(logits, rows, options, table)
    for span, run in _runs(logits, rows, table):
        limits, has_top_k = all_limits.take(span), options.top_k[span] < vocab_size
        if find_ranks is None:
            values, order = run.sort(dim=-1, descending=True, stable=True)
            choice, _ = _pick(run, values, limits, has_top_k)
            ids.append(order.gather(1, choice)[:, 0])
        else:
            values = run.topk(min(_WIDTHS[-1], vocab_size), dim=-1).values
            choice, is_settled = _pick(run, values, limits, has_top_k)
            chosen = values.gather(1, choice)
            rank = choice - (values > chosen).sum(dim=-1, keepdim=True)
            ids.append(find_ranks(run, values[:, :1], chosen, rank, is_settled, limits))
        max_logits.append(values[:, 0])
    return Drawn(token_ids=torch.cat(ids), max_logits=torch.cat(max_logits))


@functools.cache
def _agreed_ranks(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return the GPU kernel if it agrees with a full sort (tested once), else None."""
    find_ranks = ranks_on_gpu()
    if find_ranks is None or device.type != "cuda":
        return find_ranks
    num_rows, vocab_size = 32, 3000
    # few distinct values, so that many are equal
    made = np.random.default_rng(0).integers(-20, 20, (num_rows, vocab_size)).astype(np.float32)
    logits, rows, ones = torch.from_numpy(made / 8).to(device), np.arange(num_rows), np.ones(32)
    top_k = np.where(rows % 2, vocab_size, 1500)
    options = DrawOptions(ones, top_k, 0.9 * ones, 0 * ones, (rows + 0.5) / num_rows)
    try:
        wanted, found = (
            draw_ranked_ahead(logits, rows, options, find_ranks=form).token_ids.cpu()
            for form in (None, find_ranks)
        )
    # a compiler may raise anything, and a sort works as well
    except Exception as failure:
        _logger.warning(
            "sampling on the GPU sorts all logits, which is slower: the faster kernel failed: %s",
            error_text(failure),
        )
        return None
    if not torch.equal(wanted, found):
        _logger.warning(
            "sampling on the GPU sorts all logits, which is slower: the faster kernel returned "
            "other tokens in its test"
        )
        return None
    return find_ranks


def _draw_candidates(
    logits: torch.Tensor, rows: Ints, options: DrawOptions, width: int
) -> tuple[Drawn, npt.NDArray[np.bool_]]:
    ids, settled, max_logits = [], [], []
    limits, table = _placed(logits, rows, options, None)
    for span, run in _runs(logits, rows, table):
        values = _largest(run, width)
        has_top_k = options.top_k[span] < logits.shape[1]
        choice, is_settled = _pick(run, values, limits.take(span), has_top_k)
        ids.append(_find_ranked(run, values, choice))
        settled.append(is_settled)
        max_logits.append(values[:, 0])
    drawn = Drawn(token_ids=torch.cat(ids), max_logits=torch.cat(max_logits))
    return drawn, torch.cat(settled).numpy()


def _largest(run: torch.Tensor, width: int) -> torch.Tensor:
    """Return the `width` largest logits of each row, descending; NaN first."""
    # numpy sorts plain values with vector instructions, several times faster than torch
    values = run.numpy()
    if width < run.shape[1]:
        values = np.partition(values, run.shape[1] - width, axis=-1)[:, -width:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _pick(
    run: torch.Tensor,  # [S, V]
    values: torch.Tensor,  # [S, C] falling
    limits: Limits,
    has_top_k_host: npt.NDArray[np.bool_],  # [S]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a column of `values` per row, and whether these candidates determine it."""
    width, vocab_size = values.shape[1], run.shape[1]
    has_top_k = limits.top_k < vocab_size
    max_logit = values[:, :1]
    weights = ((values - max_logit).double() / limits.temperature).exp()
    cumulative = weights.cumsum(dim=-1)
    smallest = values.gather(1, limits.top_k.clamp(max=width) - 1)
    in_top_k = values >= smallest
    total = (weights * in_top_k).sum(dim=-1, keepdim=True)
    if width < vocab_size and not has_top_k_host.all():
        mass = block_sums(weights_of(run, max_logit, limits.temperature)).sum(dim=-1, keepdim=True)
        total = torch.where(has_top_k, total, mass)
    is_kept = in_top_k & (cumulative - weights < limits.top_p * total)
    is_kept &= weights >= limits.min_p
    is_kept[:, 0] = True
    last = is_kept.sum(dim=-1, keepdim=True) - 1
    target = limits.uniform * cumulative.gather(1, last)
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
    is_equal = torch.from_numpy(run.numpy() == chosen.numpy())
    token_ids = _first_max(is_equal)
    tied = num_equal_before[:, 0].nonzero()[:, 0]
    if len(tied):
        occurrence = is_equal[tied].cumsum(dim=-1, dtype=torch.int32)
        is_wanted = is_equal[tied] & (occurrence == num_equal_before[tied] + 1)
        token_ids[tied] = _first_max(is_wanted)
    return token_ids


def _first_max(values: torch.Tensor) -> torch.Tensor:
    """Return the index of the first maximum, or of the first set flag, of each row."""
    if not values.is_cpu:
        return (values.int() if values.dtype == torch.bool else values).argmax(dim=-1)
    # numpy's argmax is vectorised, torch's is not
    return torch.from_numpy(values.numpy().argmax(axis=-1))


def _placed(
    logits: torch.Tensor, rows: Ints, options: DrawOptions, table: torch.Tensor | None
) -> tuple[Limits, torch.Tensor]:
    """Return options as columns on the device, and their table."""
    if table is None:
        table = torch.from_numpy(options.table(rows)).to(logits.device)
    temperature, top_k, top_p, min_p, uniform = table[1:6, :, None].unbind()
    numbers = (x.view(torch.float64) for x in (temperature, top_p, min_p, uniform))
    temperature, top_p, min_p, uniform = numbers
    return Limits(temperature, top_k, top_p, min_p, uniform), table


def _runs(
    logits: torch.Tensor, rows: Ints, table: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield runs of `rows` with their logits; views if these are all rows in order."""
    entries = _RUN_ENTRIES_CPU if logits.is_cpu else _RUN_ENTRIES_GPU
    length = max(1, entries // logits.shape[1])
    is_all = len(rows) == logits.shape[0] and bool((np.diff(rows) == 1).all())
    for start in range(0, len(rows), length):
        span = slice(start, min(start + length, len(rows)))
        if is_all:
            yield span, logits[span]
        else:
            on_device = torch.from_numpy(rows).to(logits.device) if table is None else table[0]
            yield span, logits.index_select(0, on_device[span])


def sequence_key(seed: int, sample_idx: int) -> int:
    """Return the 64-bit key from which `uniforms` makes the random numbers of one sample."""
    words = np.array([seed & _MASK, sample_idx & _MASK], np.uint64)
    first = mix64(words[:1] + GOLDEN)
    return int(mix64(first ^ (words[1:] * GOLDEN + np.uint64(1)))[0])


def uniforms(keys: Uint64s, positions: Ints) -> Floats:
    """Return one number in [0, 1) with 53 random bits for each pair of key and position."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    bits = mix64(mix64(keys + counters)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
