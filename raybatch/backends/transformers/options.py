"""Options of transformers as an engine."""

from pydantic.dataclasses import dataclass

from raybatch.config.option import CHECKED, Answers, Positive, Speed, options


@options("backend.options.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class TransformersOptions:
    """How transformers loads and runs the model."""

    attn_implementation: Answers[str | None] = None
    """As in transformers, such as "sdpa" or "eager"; None: its choice."""
    trust_remote_code: Answers[bool] = False
    """Run the Python files that come with the model."""
    max_num_seqs: Speed[Positive] = 4
    """Running sequences; each is computed alone, so more only takes more memory."""
