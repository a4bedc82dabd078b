"""Counts of tokens, under the same names from an engine to the history of runs."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """Tokens of rows, or of what else a record counts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from another request."""
    generated_tokens: int = 0

    @property
    def cached_fraction(self) -> float:
        """Share of the prompt tokens whose KV came from another request."""
        return self.cached_tokens / max(1, self.prompt_tokens)


TOKEN_COUNTS = tuple(field.name for field in fields(TokenCounts))


def token_counts(counts: object) -> dict[str, int]:
    """Return the counts of tokens of any record that has them, by name."""
    return {name: getattr(counts, name) for name in TOKEN_COUNTS}
