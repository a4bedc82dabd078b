"""What can be wrong with one row's prompt; the class name leads the row's error text.

These never end a job: the stage turns them into the row's error with `describe`.
"""

from raybatch.errors import RaybatchError


class PromptError(RaybatchError, ValueError):
    """A row's prompt cannot be used."""


class InvalidPrompt(PromptError):  # noqa: N818 - the name is seen in outputs
    """A null, a wrong type, a wrong message, or text that is not valid UTF-8."""


class RenderError(PromptError):
    """The chat template refused the row or wrote too much."""


class TokenizeError(PromptError):
    """The tokenizer could not turn the text into tokens."""


class PromptTooLong(PromptError):  # noqa: N818 - the name is seen in outputs
    """The prompt leaves no room in the model's context."""
