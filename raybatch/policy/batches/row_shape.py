"""What the rows of a job are like."""

from dataclasses import dataclass

from raybatch.errors import ConfigError


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
