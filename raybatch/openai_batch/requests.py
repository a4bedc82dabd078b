"""What a line of a batch file asks, as plain records."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from raybatch.errors import encodable
from raybatch.records.types import Task

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"

# by the task of the stage that answers; the others are none of OpenAI's
_ENDPOINTS: Mapping[Task, tuple[str, ...]] = {
    "generate": (CHAT, COMPLETIONS),
    "embed": (EMBEDDINGS,),
}

Kind = Literal["messages", "prompt", "tokens"]


class Form(NamedTuple):
    """What all rows of one job have in common, because a stage has one value for it."""

    kind: Kind  # also the name of the column of prompts
    num_samples: int
    has_logprobs: bool

    @property
    def name(self) -> str:
        """Return the name of its folders."""
        return f"{self.kind}-n{self.num_samples}{'-logprobs' if self.has_logprobs else ''}"


class Reply(NamedTuple):
    """What the answer to a request must say, beside what the rows say."""

    endpoint: str
    model: str
    num_logprobs: int | None = None  # most likely tokens to return per position
    encoding: str = "float"  # of embeddings, or "base64"


class ParsedRequest(NamedTuple):
    """A request that can be asked."""

    form: Form
    prompts: Sequence[Any]  # in the form's kind: JSON texts of messages, texts, or token ids
    sampling: Mapping[str, Any]  # that differ from the defaults; of embeddings those of pooling
    reply: Reply
    template_options: Mapping[str, Any] = MappingProxyType({})


def endpoints_of(task: Task) -> tuple[str, ...]:
    """Return the endpoints whose requests a stage with this task can answer."""
    return _ENDPOINTS.get(task, ())


class Refusal(Exception):  # noqa: N818 - it ends one line, and becomes a line of the error file
    """A line that is no request, or a request that cannot be answered.

    The code is a word for programs, as OpenAI uses them where it has one, and `param` the key of
    the body that is wrong. The status of HTTP is None where there is no request to answer at all.
    """

    def __init__(
        self, message: str, *, code: str, param: str | None = None, status: int | None = 400
    ) -> None:
        super().__init__(encodable(message))
        self.message = encodable(message)
        self.code = code
        self.param = param if param is None else encodable(param)
        self.status = status

    def record(self) -> dict[str, Any]:
        """Return it as plain data, which `Refusal(**record)` takes."""
        return dict(vars(self))


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the body of an HTTP answer that refuses a request."""
    kind = "server_error" if (refusal.status or 0) >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": refusal.message,
            "type": kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def unexecuted(code: str) -> Refusal:
    """Return why a request was left out of a batch that has ended early."""
    messages = {
        "batch_expired": "This request was not executed before the completion window ended.",
        "batch_cancelled": "This request was not executed before the batch was cancelled.",
    }
    return Refusal(messages[code], code=code, status=None)
