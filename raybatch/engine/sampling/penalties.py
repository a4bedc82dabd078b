"""What changes logits before a token is drawn: penalties for seen tokens, and min_tokens."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from raybatch.records.types import Sampling


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
        if sampling.repetition_penalty != 1.0:
            ids = np.unique(np.asarray(prompt_token_ids, np.int64))
            # ids that the model has no logit for cannot be generated either
            ids = ids[(ids >= 0) & (ids < vocab_size)]
        else:
            ids = np.empty(0, np.int64)
        self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.int64)
        self._index = {token_id: idx for idx, token_id in enumerate(ids.tolist())}
        for token_id in np.asarray(generated, np.int64).tolist():
            self.record(token_id)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
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
    repetition = np.repeat([history.repetition for history in histories], sizes)
    frequency = np.repeat([history.frequency for history in histories], sizes)
    presence = np.repeat([history.presence for history in histories], sizes)
    offset = frequency * counts + presence * (counts > 0)
    flat_idx = torch.from_numpy(rows * logits.shape[1] + ids).to(logits.device)
    factor = torch.from_numpy(repetition.astype(np.float32)).to(logits.device)
    flat = logits.view(-1)
    seen = flat[flat_idx]
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    seen -= torch.from_numpy(offset.astype(np.float32)).to(logits.device)
    flat[flat_idx] = seen


def mask_tokens(
    logits: torch.Tensor,  # [S, V] float32, modified in place
    row_idx: Sequence[int],
    token_ids: Sequence[npt.NDArray[np.int64]],
) -> None:
    """Make the given tokens of each row impossible."""
    rows = np.repeat(np.asarray(row_idx, np.int64), [len(ids) for ids in token_ids])
    flat_idx = rows * logits.shape[1] + np.concatenate(token_ids)
    logits.view(-1)[torch.from_numpy(flat_idx).to(logits.device)] = -torch.inf
