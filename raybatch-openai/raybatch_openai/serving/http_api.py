"""The Files and Batches API as an ASGI application; it reads and writes the folder of a server."""

import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive

from raybatch_openai.batch.requests import Refusal, refusal_of
from raybatch_openai.serving.stores import ENDED, Batch, BatchStore, FileStore, no_such

logger = logging.getLogger(__name__)

# of an upload besides the content: boundaries, names and other fields
_FORM_BYTES = 64 << 10
_MAX_BODY_BYTES = 1 << 20
_MAX_FIELDS = 8
_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 30 * 86400


_Name = Annotated[str, Field(max_length=64)]
_Text = Annotated[str, Field(max_length=512)]


class NewBatch(BaseModel):
    """Body of a request that creates a batch."""

    model_config = ConfigDict(strict=True, extra="forbid")
    input_file_id: str
    endpoint: Any = None
    completion_window: Any = "24h"
    metadata: Annotated[dict[_Name, _Text], Field(max_length=16)] | None = None


@dataclass(kw_only=True)
class Api:
    """HTTP handlers of the Files and Batches API; `app` returns them as an application.

    Handlers that are not coroutines run in threads.
    """

    folder: str
    models: tuple[str, ...]
    """Names of the model; batches show the first one."""
    endpoints: tuple[str, ...]
    key_digest: str = ""
    """SHA-256 of the API key; "" requires no key."""
    max_file_bytes: int
    created_at: int
    """Of the model, as clients see it; Unix seconds."""

    def app(self) -> Starlette:
        """Return the ASGI application."""
        self._files, self._batches = FileStore(self.folder), BatchStore(self.folder)
        routes: list[tuple[str, Callable[[Request], Any], str]] = [
            ("/v1/files", self.create_file, "POST"),
            ("/v1/files", self.list_files, "GET"),
            ("/v1/files/{id}", self.get_file, "GET"),
            ("/v1/files/{id}", self.remove_file, "DELETE"),
            ("/v1/files/{id}/content", self.read_file, "GET"),
            ("/v1/batches", self.create_batch, "POST"),
            ("/v1/batches", self.list_batches, "GET"),
            ("/v1/batches/{id}", self.get_batch, "GET"),
            ("/v1/batches/{id}/cancel", self.cancel_batch, "POST"),
            ("/v1/models", self.list_models, "GET"),
            ("/v1/models/{id:path}", self.get_model, "GET"),
        ]
        guarded = [Route(path, self.guarded(to), methods=[verb]) for path, to, verb in routes]
        healthy = Route("/healthz", _healthy, methods=["GET"])
        return Starlette(
            routes=[*guarded, healthy], exception_handlers={HTTPException: _http_error}
        )

    def guarded(
        self, handler: Callable[[Request], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that checks the API key, and answers errors in OpenAI's form."""

        async def handle(request: Request) -> Response:
            try:
                self._check_key(request)
                is_async = iscoroutinefunction(handler)
                answer: Response = await (
                    handler(request) if is_async else run_in_threadpool(handler, request)
                )
                return answer
            except Refusal as refusal:
                return JSONResponse(refusal.body(), refusal.status or 400)
            except Exception:  # the log has the details, which clients must not see
                logger.exception("%s %s failed", request.method, request.url.path)
                unknown = Refusal("internal server error", status=500, code="server_error")
                return JSONResponse(unknown.body(), 500)

        return handle

    def _check_key(self, request: Request) -> None:
        if not self.key_digest:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        is_right = hmac.compare_digest(digest, self.key_digest)
        if scheme.lower() != "bearer" or not is_right:
            raise Refusal("the API key is missing or wrong", status=401, code="invalid_api_key")

    async def create_file(self, request: Request) -> Response:
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise Refusal("send multipart/form-data with the fields file and purpose")
        max_upload = self.max_file_bytes + _FORM_BYTES
        request = Request(request.scope, _limited(request.receive, max_upload))
        if int(request.headers.get("content-length") or 0) > max_upload:
            raise _too_large(max_upload)
        try:
            async with request.form(max_files=1, max_fields=_MAX_FIELDS) as form:
                upload, purpose = form.get("file"), form.get("purpose")
                others = sorted(set(form) - {"file", "purpose"})
                if others:
                    raise Refusal(f"the form field {others[0]} is not supported", param=others[0])
                if purpose != "batch":
                    raise Refusal("purpose must be 'batch'", param="purpose")
                if not isinstance(upload, UploadFile):
                    raise Refusal('the form field "file" must be an uploaded file', param="file")
                if (upload.size or 0) > self.max_file_bytes:
                    raise _too_large(self.max_file_bytes)
                # without folders: a client may write a file under the name that it receives
                name = re.split(r"[/\\]", upload.filename or "")[-1][:255] or "batch.jsonl"
                record = await run_in_threadpool(
                    self._files.add, upload.file, filename=name, purpose="batch"
                )
        except (MultiPartException, HTTPException, AssertionError) as error:
            raise Refusal("the body must be a form with a file and a purpose") from error
        return JSONResponse(record.view())

    def list_files(self, request: Request) -> Response:
        records, query = self._files.all(), request.query_params
        if query.get("order") not in (None, "asc", "desc"):
            raise Refusal("order must be asc or desc", param="order")
        if query.get("order") == "asc":
            records.reverse()
        purpose = query.get("purpose")
        views = {each.id: each.view() for each in records if purpose in (None, each.purpose)}
        ids, has_more = page_of(list(views), query, default=10_000, most=10_000)
        return _listed([views[name] for name in ids], has_more=has_more)

    def get_file(self, request: Request) -> Response:
        return JSONResponse(self._files.get(request.path_params["id"]).view())

    def remove_file(self, request: Request) -> Response:
        file_id = self._files.get(request.path_params["id"]).id
        for batch in map(self._batches.get, self._batches.ids()):
            if batch.request.input_file_id == file_id and batch.status.status not in ENDED:
                raise Refusal(
                    f"the file is the input of {batch.request.id}, which has not ended; cancel "
                    "it first",
                    status=409,
                    code="file_in_use",
                )
        self._files.remove(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    def read_file(self, request: Request) -> Response:
        record = self._files.get(request.path_params["id"])
        headers = {"content-length": str(record.bytes), "x-content-type-options": "nosniff"}
        return StreamingResponse(
            self._files.chunks(record.id), media_type="application/octet-stream", headers=headers
        )

    async def create_batch(self, request: Request) -> Response:
        values = await _json_body(request)
        try:
            body = NewBatch.model_validate({k: v for k, v in values.items() if v is not None})
        except ValidationError as error:
            raise refusal_of(error) from None
        window_s = window_seconds(body.completion_window)
        if body.endpoint not in self.endpoints:
            message = f"endpoint must be {' or '.join(self.endpoints)} on this server"
            raise Refusal(message, param="endpoint", code="invalid_url")
        return await run_in_threadpool(self._add_batch, body, window_s)

    def _add_batch(self, body: NewBatch, window_s: int) -> Response:
        file_id = body.input_file_id
        try:
            file = self._files.get(file_id)
        except Refusal as refusal:
            if refusal.status == 404:
                raise no_such(f"file as {file_id!r}", param="input_file_id") from None
            raise
        if file.purpose != "batch":
            raise Refusal(
                "the file must have the purpose 'batch'; upload it with this purpose",
                param="input_file_id",
            )
        return self._view(self._batches.add(window_s=window_s, **body.model_dump()))

    def list_batches(self, request: Request) -> Response:
        ids = self._batches.ids()[::-1]
        page, has_more = page_of(ids, request.query_params, default=20, most=100)
        model = self.models[0]
        views = [self._batches.get(name).view(model) for name in page]
        return _listed(views, has_more=has_more)

    def get_batch(self, request: Request) -> Response:
        return self._view(self._batches.get(request.path_params["id"]))

    def cancel_batch(self, request: Request) -> Response:
        batch = self._batches.get(request.path_params["id"])
        if batch.status.status in ENDED:
            raise Refusal(
                f"the batch is {batch.status.status} and cannot be cancelled",
                status=409,
                code="batch_ended",
            )
        self._batches.cancel(batch.request.id)
        return self._view(self._batches.get(batch.request.id))

    def list_models(self, request: Request) -> Response:
        return _listed([self._model(name) for name in self.models])

    def get_model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name not in self.models:
            raise no_such("model", param="model")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        about = {"object": "model", "created": self.created_at, "owned_by": "raybatch"}
        return {"id": name, **about}

    def _view(self, batch: Batch) -> Response:
        return JSONResponse(batch.view(self.models[0]))


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    refusal = Refusal(
        f"{request.method} {request.url.path} is not served here; this server has OpenAI's Files "
        "and Batches API",
        status=status,
        code="not_found",
    )
    return JSONResponse(refusal.body(), status)


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """Return a receiver of a body that raises Refusal beyond this size."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        return message

    return limited


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(
        f"the file is larger than {max_bytes:,} bytes", status=413, param="file", code="too_large"
    )


async def _json_body(request: Request) -> dict[str, Any]:
    limited = Request(request.scope, _limited(request.receive, _MAX_BODY_BYTES))
    try:
        body = await limited.json()
    except (ValueError, RecursionError) as error:
        raise Refusal("the body must be JSON") from error
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    return body


def window_seconds(window: object) -> int:
    """Return the seconds of a completion window such as "24h"; raise Refusal for any other."""
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise Refusal(
            "completion_window must be a duration such as 90m, 24h or 7d, and at most 30d",
            param="completion_window",
        )
    return seconds


def page_of(
    ids: Sequence[str], query: Mapping[str, str], *, default: int, most: int
) -> tuple[Sequence[str], bool]:
    """Return the ids of the page that a query requests, and whether more ids follow.

    Args:
        ids: all ids, in order.
        query: parameters of the URL: `limit` and `after`.
        default: limit if the query has none.
        most: largest limit.
    """
    text, after = query.get("limit", str(default)), query.get("after")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise Refusal(f"limit must be a whole number from 1 to {most}", param="limit")
    limit = int(text[:9])
    if after is not None:
        if after not in ids:
            raise Refusal(f"after must be an id of the list, got {after!r}", param="after")
        ids = ids[list(ids).index(after) + 1 :]
    return ids[:limit], len(ids) > limit


def _listed(views: Sequence[Mapping[str, Any]], *, has_more: bool = False) -> Response:
    first, last = (views[0]["id"], views[-1]["id"]) if views else (None, None)
    ends = {"first_id": first, "last_id": last, "has_more": has_more}
    return JSONResponse({"object": "list", "data": list(views), **ends})
