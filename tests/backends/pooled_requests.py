"""Requests of the tasks that generate nothing."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from raybatch.records.types import Request, Sampling


def pooled_request(request_id: int, tokens: Sequence[int], **payload: Any) -> Request:
    """Return a request for one vector, with what goes beside its tokens."""
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array(tokens, np.int32),
        sampling=Sampling(max_tokens=1),
        payload=payload,
    )
