"""Which rows an engine refuses, and when a running sequence ends: arrays, one pass per step."""

from dataclasses import dataclass

import numpy as np

from raybatch.engine.sequences.table import completion_of
from raybatch.records.arrays import Ints
from raybatch.records.types import Completion, FinishReason, Sampling, SequenceState, TokenIds
from raybatch.text.detokenizer import StopChecker

Finish = tuple[int, FinishReason, str | int | None]
_NO_TOKEN = -1  # pads rows of stop token ids; no token has this id
# stop token ids of a sequence up to which they are compared as an array, over all sequences
_MAX_COLUMNS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimits:
    """What the model and the KV cache can take."""

    vocab_size: int
    max_model_len: int
    kv_tokens: int
    # that makes it larger
    kv_option: str = "engine.kv_cache_bytes"

    def find_failure(self, state: SequenceState, *, refusal: str = "") -> Completion | None:
        """Return the completion of a sequence that cannot run, None when it can.

        `refusal` says why its sampling options cannot be had, "" where they can.
        """
        prompt = state.request.prompt_token_ids
        num_tokens = len(prompt) + len(state.token_ids)
        reason: FinishReason = "error"
        if not len(prompt):
            error = "EmptyPrompt: the prompt has no tokens"
        elif num_tokens >= self.max_model_len:
            error = f"PromptTooLong: {num_tokens} tokens, the model's limit is {self.max_model_len}"
        elif prompt.min() < 0 or prompt.max() >= self.vocab_size:
            error = f"BadTokenId: token ids must be in 0..{self.vocab_size - 1}"
        elif num_tokens > self.kv_tokens and len(state.token_ids):
            # as it would have ended where it began
            return completion_of(state, "capacity")
        elif num_tokens > self.kv_tokens:
            reason = "capacity"
            error = (
                f"CapacityError: {num_tokens} tokens, the KV cache holds {self.kv_tokens}; raise "
                f"{self.kv_option}"
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

    Order of the rules: end token, stop token, stop string, length. None but length applies before
    `min_tokens`.
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
        """Take a sequence into an empty slot; `generated` are its tokens so far."""
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
        """Return (slot, reason, stop reason) of the sequences that end.

        Each of the slots, int64 [S], has a token just generated, the `num_generated`-th; one with
        `max_generated` tokens ends by length.
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
            # fed before min_tokens too, because the text before it counts
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
