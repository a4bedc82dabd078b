"""Rejects invalid rows and detects finished sequences, vectorised over each step."""

from dataclasses import dataclass

import numpy as np

from raybatch.engine.sequences.table import completion_of
from raybatch.records.arrays import Ints
from raybatch.records.types import Completion, FinishReason, Sampling, SequenceState, TokenIds
from raybatch.text.detokenizer import StopChecker

Finish = tuple[int, FinishReason, str | int | None]
_NO_TOKEN = -1  # pads rows of stop token ids; no token has this id
# most stop token ids of a sequence for the vectorised check
_MAX_COLUMNS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimits:
    """Checks rows against the limits of the model and the KV cache."""

    vocab_size: int
    max_model_len: int
    kv_tokens: int
    # option that raises `kv_tokens`
    kv_option: str = "engine.kv_cache_bytes"

    def find_failure(self, state: SequenceState, *, refusal: str = "") -> Completion | None:
        """Return the completion of a sequence that cannot run; None if it can.

        `refusal` is the reason why its sampling options are not supported; "" if they are.
        """
        prompt = state.request.prompt_token_ids
        num_tokens = len(prompt) + len(state.token_ids)
        reason: FinishReason = "error"
        if not len(prompt):
            error = "EmptyPrompt: the prompt has no tokens"
        elif num_tokens >= self.max_model_len:
            error = f"PromptTooLong: {num_tokens} tokens, but the limit is {self.max_model_len}"
        elif prompt.min() < 0 or prompt.max() >= self.vocab_size:
            error = f"BadTokenId: token ids must be in 0..{self.vocab_size - 1}"
        elif num_tokens > self.kv_tokens and len(state.token_ids):
            # ends as it would have on its first engine
            return completion_of(state, "capacity")
        elif num_tokens > self.kv_tokens:
            reason = "capacity"
            error = (
                f"CapacityError: {num_tokens} tokens, but the KV cache holds {self.kv_tokens}; "
                f"raise {self.kv_option}"
            )
        elif refusal:
            error = f"InvalidSampling: {refusal}"
        else:
            return None
        return Completion(
            request_id=state.request.request_id,
            sample_idx=state.sample_idx,
            finish_reason=reason,
            error=error,
        )


class FinishRules:
    """Finds the sequences that end with the token just generated.

    Order of the rules: end token, stop token, stop string, length. Before `min_tokens` only length
    applies.
    """

    def __init__(
        self, max_slots: int, eos_token_ids: tuple[int, ...], stop_checker: StopChecker
    ) -> None:
        self._eos_token_ids = np.array(eos_token_ids, np.int64)
        self._stop_checker = stop_checker
        self._ignores_eos = np.zeros(max_slots, np.bool_)
        self._has_stop_strings = np.zeros(max_slots, np.bool_)
        self._min_tokens = np.zeros(max_slots, np.int64)
        self._stop_ids = np.full((max_slots, 1), _NO_TOKEN, np.int64)
        self._many_stop_ids: dict[int, frozenset[int]] = {}

    def add(self, slot: int, sampling: Sampling, prompt: TokenIds, generated: TokenIds) -> None:
        """Add a sequence in an empty slot; `generated` are its tokens so far."""
        stop_ids = sampling.stop_token_ids
        if len(stop_ids) > _MAX_COLUMNS:
            self._many_stop_ids[slot], stop_ids = frozenset(stop_ids), ()
        if (more := len(stop_ids) - self._stop_ids.shape[1]) > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, more)), constant_values=_NO_TOKEN)
        self._stop_ids[slot] = _NO_TOKEN
        self._stop_ids[slot, : len(stop_ids)] = stop_ids
        self._ignores_eos[slot] = sampling.ignore_eos
        self._min_tokens[slot] = sampling.min_tokens
        self._has_stop_strings[slot] = bool(sampling.stop)
        if sampling.stop:
            self._stop_checker.add(slot, sampling, prompt)
            for token_id in generated.tolist():
                self._stop_checker.check(slot, token_id)

    def remove(self, slot: int) -> None:
        self._many_stop_ids.pop(slot, None)
        if self._has_stop_strings[slot]:
            self._stop_checker.remove(slot)
            self._has_stop_strings[slot] = False

    def find(
        self, slots: Ints, token_ids: Ints, num_generated: Ints, max_generated: Ints
    ) -> list[Finish]:
        """Return (slot, reason, stop reason) of each sequence that ends with its newest token.

        The stop reason is a stop token id, a stop string or None. Arrays are int64 [S], one item
        per slot: `token_ids` are the newest tokens, `num_generated` counts them too, and a sequence
        ends by length at `max_generated`.
        """
        may_stop = num_generated >= self._min_tokens[slots]
        is_eos = np.isin(token_ids, self._eos_token_ids) & ~self._ignores_eos[slots] & may_stop
        is_stop = (token_ids[:, None] == self._stop_ids[slots]).any(axis=1)
        if many := self._many_stop_ids:
            pairs = zip(slots.tolist(), token_ids.tolist(), strict=True)
            hits = [token_id in many.get(slot, ()) for slot, token_id in pairs]
            is_stop |= np.array(hits, np.bool_)
        is_stop &= may_stop
        is_full = num_generated >= max_generated
        has_strings = self._has_stop_strings[slots]
        finished: list[Finish] = []
        for i in np.flatnonzero(is_eos | is_stop | is_full | has_strings).tolist():
            slot, token_id = int(slots[i]), int(token_ids[i])
            # also before min_tokens, because a stop string may start there
            text = self._stop_checker.check(slot, token_id) if has_strings[i] else None
            if is_eos[i]:
                finished.append((slot, "stop", None))
            elif is_stop[i]:
                finished.append((slot, "stop", token_id))
            elif text is not None and may_stop[i]:
                finished.append((slot, "stop", text))
            elif is_full[i]:
                finished.append((slot, "length", None))
        return finished
