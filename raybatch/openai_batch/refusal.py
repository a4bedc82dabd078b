"""Why a line of a batch file is not answered."""

from typing import Any

from raybatch.errors import encodable


class Refusal(Exception):  # noqa: N818 - it ends one line, and becomes a line of the error file
    """A line that is no request, or a request that cannot be answered.

    Args:
        message: what is wrong, and the way out.
        code: a word for programs, as OpenAI uses them where it has one.
        param: the key of the body that is wrong; None for others.
        status: of HTTP; None where there is no request to answer at all.
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
        return {
            "message": self.message,
            "code": self.code,
            "param": self.param,
            "status": self.status,
        }


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
    said = {
        "batch_expired": "This request was not executed before the completion window ended.",
        "batch_cancelled": "This request was not executed before the batch was cancelled.",
    }
    return Refusal(said[code], code=code, status=None)
