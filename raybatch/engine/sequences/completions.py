"""What came out of a sequence that does not run any more; the same for every engine."""

from raybatch.records.types import Completion, FinishReason, SequenceState, Vector


def completion_of(
    state: SequenceState,
    reason: FinishReason,
    stop_reason: str | int | None = None,
    *,
    error: str = "",
    vector: Vector | None = None,
) -> Completion:
    """Return the completion of a sequence.

    Args:
        state: with all of its tokens.
        reason: why it ended.
        stop_reason: the stop string or stop token that ended it, None for the end token.
        error: "" for a good one.
        vector: what was made of the prompt where nothing is generated.
    """
    return Completion(
        request_id=state.request.request_id,
        sample_idx=state.sample_idx,
        token_ids=state.token_ids,
        finish_reason=reason,
        stop_reason=stop_reason,
        # the other samples take the prompt from the first one, which is no other request
        num_cached_tokens=0 if state.sample_idx else state.num_cached_tokens,
        vector=vector,
        logprobs=state.logprobs,
        error=error,
    )
