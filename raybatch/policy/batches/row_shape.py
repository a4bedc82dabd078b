"""What the rows of a job are like, and with that the sequences of a step."""

from dataclasses import dataclass
from typing import Literal

from raybatch.errors import ConfigError
from raybatch.policy.batches.layer_plan import Workload

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShape:
    """What the rows of a job are like, on average; prompt tokens are those to compute."""

    prompt_tokens: int = 512
    output_tokens: int = 128

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a row is {getattr(self, name)}; it must be >= 1")

    @classmethod
    def within(cls, max_model_len: int) -> "RowShape":
        """Return the default, shortened to what a model of so many tokens takes."""
        usual = cls()
        output_tokens = max(1, min(usual.output_tokens, max_model_len // 5))
        prompt_tokens = max(1, min(usual.prompt_tokens, max_model_len - output_tokens))
        return cls(prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def workload(self, phase: Phase, *, waiting_sequences: int | None = None) -> Workload:
        """Return what sequences are like in a phase; they decode half way through their output."""
        if phase == "prefill":
            return Workload(
                tokens_per_sequence=self.prompt_tokens,
                reserved_tokens=self.output_tokens,
                waiting_sequences=waiting_sequences,
            )
        done = self.output_tokens // 2
        return Workload(
            cached_tokens=self.prompt_tokens + done,
            # one is the token of the step itself
            reserved_tokens=self.output_tokens - done - 1,
            waiting_sequences=waiting_sequences,
        )
