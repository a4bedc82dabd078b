"""Estimates the lengths of an engine's rows from those that arrived and finished."""

from collections import deque
from collections.abc import Collection, Iterable

import numpy as np

from raybatch.engine.scheduling.admission import expected_len
from raybatch.policy.cost.layers import RowsAhead
from raybatch.records.types import Completion, Request

# latest rows that count: lengths may change along a plan
_NUM_SEEN = 4096
# finished rows needed to prefer generated lengths over bounds
_MIN_ENDED = 32


class RowsSeen:
    """Tracks the latest rows and estimates their computed prompt and output lengths.

    The output length of a row is the one its plan expects; else that of finished rows of the
    pool; else the most tokens it may generate. A prefix that a group shares counts once.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._prompts: deque[int] = deque(maxlen=_NUM_SEEN)
        self._shared: deque[int] = deque(maxlen=_NUM_SEEN)
        self._group_ids: deque[int] = deque(maxlen=_NUM_SEEN)
        self._outputs: deque[tuple[int, bool]] = deque(
            maxlen=_NUM_SEEN
        )  # and whether it is measured
        self._ended: deque[int] = deque(maxlen=_NUM_SEEN)
        # lengths of rows that finished elsewhere, sent with requests
        self._likely: deque[int] = deque(maxlen=_NUM_SEEN)
        # latest groups, in order
        self._groups: dict[int | None, None] = {}
        self._ids: dict[int | None, None] = {}
        self._max_lens: deque[int] = deque(maxlen=_NUM_SEEN)

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def add(self, requests: Iterable[Request]) -> int:
        """Add rows; return the longest length, prompt and output, that one of them may reach."""
        longest = 0
        for request in requests:
            num_prompt = len(request.prompt_token_ids)
            if not 0 < num_prompt < self._max_model_len:
                # invalid
                continue
            max_len = min(num_prompt + request.sampling.max_tokens, self._max_model_len)
            longest = max(longest, max_len)
            self._max_lens.append(max_len)
            if request.request_id in self._ids:
                # returned to the pool before, and here again
                continue
            _remember(self._ids, request.request_id)
            expected = expected_len(request, max_len)
            is_shared = request.group_id in self._groups
            if request.group_id is not None:
                _remember(self._groups, request.group_id)
                self._group_ids.append(request.group_id)
            self._shared.append(is_shared * request.prefix_len)
            self._prompts.append(max(1, num_prompt - self._shared[-1]))
            self._likely.extend(request.likely_output_lens)
            self._outputs.append(((expected or max_len) - num_prompt, expected is not None))
        return longest

    def note(self, completions: Collection[Completion]) -> None:
        self._ended.extend(max(1, len(c.token_ids)) for c in completions if not c.error)

    def ahead(self) -> RowsAhead:
        """Return the lengths to expect of the next rows, from those added last (at least one)."""
        outputs = [length for length, is_known in self._outputs if is_known]
        if not outputs:
            ended = self._ended if len(self._ended) >= _MIN_ENDED else self._likely
            outputs = list(ended or (n for n, _ in self._outputs))
        prompts, shared = np.array(self._prompts, float), np.array(self._shared, float)
        pairs = prompts * (shared + (prompts + 1) / 2)
        return RowsAhead.of(
            float(prompts.mean()),
            np.array(outputs, float),
            float(np.mean(outputs)),
            longest_tokens=max(self._max_lens),
            prompt_reads=float(pairs.sum() / prompts.sum()),
            shared_tokens=float(shared.mean()),
            group_rows=len(self._group_ids) / max(1, len(set(self._group_ids))) or 1.0,
        )


def _remember(latest: dict[int | None, None], key: int) -> None:
    """Mark a key as latest; drop the oldest one beyond the limit."""
    latest[key] = None
    if len(latest) > _NUM_SEEN:
        del latest[next(iter(latest))]
