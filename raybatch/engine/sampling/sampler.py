"""Batched sampling: from the logits of one step to a token per sequence.

Options are stored in arrays indexed by slot, a sequence's index in the engine. Rows of a step are
grouped by the work they need, so that greedy rows never pay for random ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.sampling.draw import (
    Drawn,
    DrawnTokens,
    DrawOptions,
    draw_dense,
    draw_greedy,
    draw_ranked,
    sequence_key,
    uniforms,
)
from raybatch.engine.sampling.grammars import GrammarSlots
from raybatch.records.arrays import Ints
from raybatch.records.types import Sampling, TokenIds, TokenLogprobs

# brings numbers to a device
Upload = Callable[[Ints, torch.device], torch.Tensor]
Flags = npt.NDArray[np.bool_]

# below this, dividing by the temperature is meaningless in float32; the same limit as in vLLM
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleResult:
    """The sampled tokens of one step."""

    # int64 [S]; 0 for a non-finite row
    token_ids: Ints
    # bool [S]; False if the logits have NaN, or infinity as the largest value
    is_finite: Flags
    # per row a pair (token ids, log probabilities) with the sampled token first, or None if not
    # requested; None if no row requested them
    logprobs: list[TokenLogprobs | None] | None = None


class Sampler:
    """Samples the next token of many sequences.

    Order and formulas follow transformers and vLLM: repetition, frequency and presence penalty,
    min_tokens, temperature, top_k, top_p, min_p. Logits equal to the top_k-th are all kept. Each
    (seed, sample, position) has one random number.

    Args:
        eos_token_ids: end tokens of the model, suppressed until min_tokens.
        grammars: grammars of constrained answers; None if these are not supported.
        upload: copies arrays to the device; None copies synchronously.
    """

    def __init__(
        self,
        vocab_size: int,
        max_slots: int,
        eos_token_ids: tuple[int, ...],
        grammars: GrammarSlots | None = None,
        upload: Upload | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._upload = upload or _copy
        self._eos_token_ids = eos_token_ids
        self._is_random = np.zeros(max_slots, np.bool_)
        self._is_penalized = np.zeros(max_slots, np.bool_)
        self._min_tokens = np.zeros(max_slots, np.int64)
        self._has_grammar = np.zeros(max_slots, np.bool_)
        self._num_logprobs = np.full(max_slots, -1, np.int64)
        self._temperature = np.ones(max_slots)
        self._top_k = np.full(max_slots, vocab_size, np.int64)
        self._top_p = np.ones(max_slots)
        self._min_p = np.zeros(max_slots)
        self._key = np.zeros(max_slots, np.uint64)
        self._histories: dict[int, TokenHistory] = {}
        self._held_back: dict[int, Ints] = {}

    def refusal(self, sampling: Sampling) -> str:
        if sampling.structured_outputs is None:
            return ""
        if self._grammars is None:
            return "structured_outputs need a tokenizer, but this engine has none"
        return self._grammars.refusal(_constraint(sampling))

    def is_stateless(self, sampling: Sampling) -> bool:
        """Return whether a token depends only on logits, seed and position.

        Then several positions of a sequence can be sampled at once. `min_tokens` depends on the
        position only; penalties and grammars depend on earlier tokens.
        """
        return not has_penalty(sampling) and sampling.structured_outputs is None

    def add(
        self,
        slot: int,
        sampling: Sampling,
        seed: int,
        sample_idx: int,
        prompt_token_ids: npt.ArrayLike,
        generated: npt.ArrayLike = (),
    ) -> None:
        """Add a sequence with its tokens so far; replaces the contents of the slot."""
        self.remove(slot)
        self._is_random[slot] = sampling.temperature >= _MIN_TEMPERATURE
        self._temperature[slot] = max(sampling.temperature, _MIN_TEMPERATURE)
        self._top_k[slot] = min(sampling.top_k or self._vocab_size, self._vocab_size)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._key[slot] = sequence_key(seed, sample_idx)
        self._num_logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        if has_penalty(sampling):
            self._is_penalized[slot] = True
            self._histories[slot] = TokenHistory(
                sampling, self._vocab_size, prompt_token_ids, generated
            )
        held_back = {*self._eos_token_ids, *sampling.stop_token_ids}
        ids = sorted(token_id for token_id in held_back if 0 <= token_id < self._vocab_size)
        if sampling.min_tokens and ids:
            self._min_tokens[slot] = sampling.min_tokens
            self._held_back[slot] = np.asarray(ids, np.int64)
        if self._grammars is not None:
            self._grammars.add(slot, _constraint(sampling), generated)
            self._has_grammar[slot] = sampling.structured_outputs is not None

    def remove(self, slot: int) -> None:
        self._is_random[slot] = False
        self._is_penalized[slot] = False
        self._min_tokens[slot] = 0
        self._num_logprobs[slot] = -1
        self._histories.pop(slot, None)
        self._held_back.pop(slot, None)
        if self._grammars is not None:
            self._grammars.remove(slot)
            self._has_grammar[slot] = False

    def sample(
        self,
        logits: torch.Tensor,  # [S, V] float32, read only
        slots: Ints,
        num_generated: Ints,
    ) -> SampleResult:
        """Sample one token for each row of `logits`; penalties and grammars take note of it.

        `slots` are the slots of the rows; one that is not stateless may occur once only.
        `num_generated` are the numbers of tokens before each sampled one.
        """
        drawn = self.draw(logits, slots, num_generated)
        token_ids, is_finite = drawn.token_ids.cpu().numpy(), drawn.is_finite.cpu().numpy()
        for row in np.flatnonzero(self._is_penalized[slots] & is_finite):
            self._histories[int(slots[row])].record(int(token_ids[row]))
        if self._grammars is not None:
            for row in np.flatnonzero(self._has_grammar[slots] & is_finite):
                self._grammars.accept(int(slots[row]), int(token_ids[row]))
        return SampleResult(
            token_ids=token_ids,
            is_finite=is_finite,
            logprobs=gather_logprobs(logits, token_ids, self._num_logprobs[slots]),
        )

    def can_wait(self, slots: Ints) -> bool:
        """Return whether the next step can start before the host reads the tokens of these slots.

        It cannot with penalties, grammars or logprobs, which need the tokens.
        """
        needs_host = self._is_penalized[slots] | self._has_grammar[slots]
        needs_host |= self._num_logprobs[slots] >= 0
        return not needs_host.any()

    def draw(self, logits: torch.Tensor, slots: Ints, num_generated: Ints) -> DrawnTokens:
        """Sample as `sample` does, on the device, without host sync and without state.

        One copy uploads the options of all rows, another one the tokens that `min_tokens`
        suppresses.
        """
        is_held_back = num_generated < self._min_tokens[slots]
        is_adjusted = self._is_penalized[slots] | is_held_back | self._has_grammar[slots]
        if not len(slots):
            drawn = Drawn(logits.new_empty(0, dtype=torch.int64), logits.new_empty(0))
        elif self._is_random[slots].any() or is_adjusted.any():
            drawn = self._draw(logits, slots, num_generated, is_adjusted, is_held_back)
        else:
            drawn = draw_greedy(logits, np.arange(len(slots)))
        is_finite = drawn.max_logits.isfinite()
        return DrawnTokens(drawn.token_ids.where(is_finite, 0), is_finite)

    def _draw(
        self,
        logits: torch.Tensor,
        slots: Ints,
        num_generated: Ints,
        is_adjusted: Flags,
        is_held_back: Flags,
    ) -> Drawn:
        """Draw rows grouped by kind."""
        options = DrawOptions(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            uniform=uniforms(self._key[slots], num_generated),
        )
        is_cut = (options.top_k < self._vocab_size) | (options.top_p < 1.0)
        kinds = np.where(self._is_random[slots], 1 + is_cut, 0) + len(_DRAWS) * is_adjusted
        # group rows by kind; adjusted rows come last and have their own logits
        order = np.argsort(kinds, kind="stable")
        kinds, options, num_plain = kinds[order], options.take(order), int((~is_adjusted).sum())
        rows = np.concatenate((order[:num_plain], np.arange(len(order) - num_plain)))
        table = np.concatenate((options.table(rows), (order, np.argsort(order))))
        on_device = self._upload(table.reshape(-1), logits.device).view(table.shape)
        adjusted = None
        if num_plain < len(order):
            group = order[num_plain:]
            adjusted = logits.index_select(0, on_device[-2, num_plain:])
            self._adjust_(adjusted, slots[group], is_held_back[group])
        parts = list[Drawn]()
        for kind in np.unique(kinds).tolist():
            start, stop = np.searchsorted(kinds, (kind, kind + 1)).tolist()
            source = logits if kind < len(_DRAWS) or adjusted is None else adjusted
            members = np.arange(start, stop)
            draw, of_kind = _DRAWS[kind % len(_DRAWS)], on_device[:, start:stop]
            parts.append(draw(source, rows[members], options.take(members), of_kind))
        if len(parts) == 1:
            return parts[0]
        columns = zip(*parts, strict=True)
        return Drawn._make(torch.cat(column)[on_device[-1]] for column in columns)

    def _adjust_(self, logits: torch.Tensor, slots: Ints, is_held_back: Flags) -> None:
        """Apply penalties, min_tokens and grammars to the logits of these slots."""
        penalized = np.flatnonzero(self._is_penalized[slots]).tolist()
        if penalized:
            histories = [self._histories[int(slots[idx])] for idx in penalized]
            apply_penalties(logits, penalized, histories)
        held_back = np.flatnonzero(is_held_back).tolist()
        if held_back:
            ids = [self._held_back[int(slots[idx])] for idx in held_back]
            mask_tokens(logits, held_back, ids, self._upload)
        constrained = np.flatnonzero(self._has_grammar[slots]).tolist()
        if constrained and self._grammars is not None:
            self._grammars.mask(logits, constrained, slots[constrained].tolist())


def _copy(numbers: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numbers).to(device)


# by kind of a row; kinds with adjusted logits follow in the same order
_DRAWS = (draw_greedy, draw_dense, draw_ranked)


def _constraint(sampling: Sampling) -> str | None:
    # `Sampling` converts mappings to text
    return cast(str | None, sampling.structured_outputs)


def has_penalty(sampling: Sampling) -> bool:
    """Return whether the options have a penalty, which depends on earlier tokens."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def gather_logprobs(
    logits: torch.Tensor,  # [S, V]
    token_ids: Ints,
    num_logprobs: Ints,
) -> list[TokenLogprobs | None] | None:
    """Return the log probabilities of the sampled token and the most likely ones of each row.

    They are the log-softmax of the raw logits. `num_logprobs` [S] is the number of most likely
    tokens per row; negative: none, and None is returned for the row. Returns None instead of a
    list if no row has any.
    """
    rows = np.flatnonzero(num_logprobs >= 0)
    if not len(rows):
        return None
    wanted = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
    normalizer = wanted.logsumexp(dim=-1, keepdim=True)
    width = min(int(num_logprobs[rows].max()), logits.shape[1])
    values, ids = wanted.topk(width, dim=-1)
    sampled = torch.from_numpy(token_ids[rows]).to(logits.device)[:, None]
    all_ids = torch.cat([sampled, ids], dim=1).cpu().numpy().astype(np.int32)
    sampled_logits = wanted.gather(1, sampled)
    all_values = (torch.cat([sampled_logits, values], dim=1) - normalizer).cpu().numpy()
    logprobs: list[TokenLogprobs | None] = [None] * len(num_logprobs)
    for idx, row in enumerate(rows.tolist()):
        logprobs[row] = _without_repeat(all_ids[idx], all_values[idx], int(num_logprobs[row]))
    return logprobs


def _without_repeat(
    ids: TokenIds, values: npt.NDArray[np.float32], num_logprobs: int
) -> TokenLogprobs:
    """Keep the first entry and the next `num_logprobs` ones without repeating it."""
    is_kept = ids[: num_logprobs + 1] != ids[0]
    is_kept[0] = True
    return ids[: num_logprobs + 1][is_kept], values[: num_logprobs + 1][is_kept]


class TokenHistory:
    """Counts the distinct generated tokens of one sequence.

    Prompt tokens are included only for a repetition penalty. Adding a token costs O(1) amortised.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        prompt_token_ids: npt.ArrayLike,
        generated: npt.ArrayLike,
    ) -> None:
        self.repetition = sampling.repetition_penalty
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        ids = np.empty(0, np.int64)
        if sampling.repetition_penalty != 1.0:
            ids = np.unique(np.asarray(prompt_token_ids, np.int64))
            # drop ids without a logit
            ids = ids[(ids >= 0) & (ids < vocab_size)]
        self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.int64)
        self._index = {token_id: idx for idx, token_id in enumerate(ids.tolist())}
        for token_id in np.asarray(generated, np.int64).tolist():
            self.record(token_id)

    @property
    def ids(self) -> Ints:
        return self._ids[: self._size]

    @property
    def counts(self) -> Ints:
        return self._counts[: self._size]

    def record(self, token_id: int) -> None:
        idx = self._index.get(token_id)
        if idx is None:
            idx = self._size
            if idx == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._index[token_id] = idx
            self._ids[idx] = token_id
            self._size += 1
        self._counts[idx] += 1


def apply_penalties(
    logits: torch.Tensor,  # [S, V] float32, modified in place
    row_idx: Sequence[int],
    histories: Sequence[TokenHistory],
) -> None:
    """Apply penalties to the logits of tokens that occurred in each row, as vLLM does.

    Repetition first (positive logits are divided, negative ones multiplied; prompt and output),
    then frequency times count, and presence once (output only).
    """
    sizes = [len(history.ids) for history in histories]
    rows = np.repeat(np.asarray(row_idx, np.int64), sizes)
    ids = np.concatenate([history.ids for history in histories])
    counts = np.concatenate([history.counts for history in histories])
    repetition, frequency, presence = (
        np.repeat([getattr(history, name) for history in histories], sizes)
        for name in ("repetition", "frequency", "presence")
    )
    offset = frequency * counts + presence * (counts > 0)
    flat_idx = torch.from_numpy(rows * logits.shape[1] + ids).to(logits.device)
    factor = torch.from_numpy(repetition.astype(np.float32)).to(logits.device)
    flat = logits.view(-1)
    seen = flat[flat_idx]
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    seen -= torch.from_numpy(offset.astype(np.float32)).to(logits.device)
    flat[flat_idx] = seen


def mask_tokens(
    logits: torch.Tensor,  # float32 [S, V], modified in place
    row_idx: Sequence[int],
    token_ids: Sequence[Ints],
    upload: Upload,
) -> None:
    rows = np.repeat(np.asarray(row_idx, np.int64), [len(ids) for ids in token_ids])
    flat_idx = rows * logits.shape[1] + np.concatenate(token_ids)
    logits.view(-1).index_fill_(0, upload(flat_idx, logits.device), -torch.inf)
