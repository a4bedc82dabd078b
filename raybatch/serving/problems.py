"""What is wrong with a request to the API, as its client is told."""

from typing import Any

from raybatch.errors import RaybatchError, encodable

_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}


class Problem(RaybatchError):  # noqa: N818 - it ends one request, and becomes its answer
    """A request that is refused.

    Args:
        message: what is wrong, and the way out.
        param: the parameter that is wrong; None for others.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = "invalid_value",
    ) -> None:
        super().__init__(encodable(message))
        self.status = status
        self.param = param if param is None else encodable(param)
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }
