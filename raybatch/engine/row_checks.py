"""What an engine refuses before it runs a sequence; pure."""

from dataclasses import dataclass

from raybatch.engine.sequences.completions import completion_of
from raybatch.records.types import Completion, FinishReason, SequenceState


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimits:
    """What the model and the KV cache can take.

    Args:
        vocab_size: token ids of a prompt are below it.
        max_model_len: longest prompt plus output, in tokens.
        kv_tokens: that the KV cache holds.
        kv_option: that makes it larger.
    """

    vocab_size: int
    max_model_len: int
    kv_tokens: int
    kv_option: str = "engine.kv_cache_bytes"

    def find_failure(self, state: SequenceState, *, refusal: str = "") -> Completion | None:
        """Return the completion of a sequence that cannot run, None when it can.

        Args:
            state: of the sequence.
            refusal: why its sampling options cannot be had, "" where they can.
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
