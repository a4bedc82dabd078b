"""Options of the transformers backend; nothing heavy is imported for them."""

from pydantic.dataclasses import dataclass

from raybatch.config.option import CHECKED, Answers, Positive, Speed, options


@options("backend.options.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class TransformersOptions:
    """What `backend.options` may hold for the kind "transformers"."""

    attn_implementation: Answers[str | None] = None
    """As transformers takes it, such as "sdpa" or "eager"; None leaves the choice to it."""

    trust_remote_code: Answers[bool] = False
    """Run the Python files that come with the model."""

    max_num_seqs: Speed[Positive] = 4
    """Sequences that run at once; each is computed alone, so more only take more memory."""
