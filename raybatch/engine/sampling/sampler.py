"""Batched sampling over slots: from the logits of one step to a token per sequence.

A slot is a sequence's place in the engine's arrays. Options live in arrays indexed by slot; rows
of a step are grouped by what they need, so that a greedy row never pays for a random one.
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

# below this a division by the temperature has no meaning in float32; vLLM draws the same line
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleResult:
    """What one step drew."""

    # int64 [S]; 0 for a row that is not finite
    token_ids: Ints
    # bool [S]; False where the logits held NaN, or infinity as the largest value
    is_finite: Flags
    # per row a pair (token ids, log probabilities) with the sampled token first, or None for a row
    # that asked for none; None when no row asked
    logprobs: list[TokenLogprobs | None] | None = None


class Sampler:
    """Draws the next token of many sequences.

    Order and formulas are those of transformers and vLLM: repetition, frequency and presence
    penalty, min_tokens, temperature, top_k, top_p, min_p. Equal logits on the edge of top_k all
    stay. One random number belongs to each (seed, sample, position).

    Args:
        eos_token_ids: end tokens of the model, held back by min_tokens.
        grammars: of answers that follow one; None where no answer can.
        upload: brings options to a device; None copies them and waits.
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
            return "structured_outputs need a tokenizer, and this engine has none"
        return self._grammars.refusal(_constraint(sampling))

    def is_stateless(self, sampling: Sampling) -> bool:
        """Return whether a token follows from logits, seed and position, and from nothing else.

        So it can be drawn for several positions of a sequence at once. `min_tokens` asks for the
        position alone; penalties and grammars ask for the tokens before.
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
        """Take over a sequence, with its tokens so far; what the slot held is replaced."""
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
            self._has_grammar[slot] = self._grammars.has(slot)

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
        """Draw one token per row and remember it where a penalty needs it.

        `num_generated` is the position of each row's token; a slot that is not stateless occurs
        once.
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
        """Return whether the host needs nothing of what is drawn for these slots to go on.

        Penalties and grammars look at the tokens, and logprobs are read with them.
        """
        needs_host = self._is_penalized[slots] | self._has_grammar[slots]
        needs_host |= self._num_logprobs[slots] >= 0
        return not needs_host.any()

    def draw(self, logits: torch.Tensor, slots: Ints, num_generated: Ints) -> DrawnTokens:
        """Draw as `sample` does, on the device; nothing is remembered, and nothing read.

        One copy brings the options of all rows, and one the tokens that `min_tokens` holds back.
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
        """Draw for rows of several kinds, each kind at once."""
        options = DrawOptions(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            uniform=uniforms(self._key[slots], num_generated),
        )
        is_cut = (options.top_k < self._vocab_size) | (options.top_p < 1.0)
        kinds = np.where(self._is_random[slots], 1 + is_cut, 0) + len(_DRAWS) * is_adjusted
        # rows of a kind side by side; adjusted ones, which are the last, have logits of their own
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


# by kind of a row; those with adjusted logits are counted from behind the last one
_DRAWS = (draw_greedy, draw_dense, draw_ranked)


def _constraint(sampling: Sampling) -> str | None:
    # a mapping becomes a text when the options are made
    return cast(str | None, sampling.structured_outputs)


def has_penalty(sampling: Sampling) -> bool:
    """Return whether the options look at tokens seen before."""
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
    """Return the log-softmax of the raw logits for the sampled and the most likely tokens.

    `num_logprobs` is how many each row wants, negative where it wants none.
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
    """Keep the first entry and those of the next `num_logprobs` that do not repeat it."""
    is_kept = ids[: num_logprobs + 1] != ids[0]
    is_kept[0] = True
    return ids[: num_logprobs + 1][is_kept], values[: num_logprobs + 1][is_kept]


class TokenHistory:
    """Distinct tokens of one sequence with the number of times each was generated.

    Tokens of the prompt take part only where a repetition penalty asks for them. A new token
    costs O(1) amortised.
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
            # ids that the model has no logit for cannot be generated either
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
    """Lower the logits of tokens that the rows have seen.

    Repetition comes first (a positive logit is divided, a negative one multiplied; prompt and
    output), then frequency times count and presence once (output only), as vLLM does it.
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
