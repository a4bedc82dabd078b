"""The Files and Batches API as an ASGI application; it reads and writes the folder of a server."""

import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive

from raybatch.serving.http_values import (
    Problem,
    checked_metadata,
    listed,
    no_such,
    page_of,
    window_seconds,
)
from raybatch.serving.stores import ENDED, Batch, BatchStore, FileStore

logger = logging.getLogger(__name__)

# around the content of an upload: borders, names and other fields
_FORM_BYTES = 64 << 10
_MAX_BODY_BYTES = 1 << 20
_MAX_FIELDS = 8

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig:
    """What the API must know.

    Args:
        models: names of the model, the first of which is shown in batches.
        key_digest: SHA-256 of the key that clients must bring; "" lets everyone in.
        created_at: of the model, for clients; seconds since 1970.
    """

    folder: str
    models: tuple[str, ...]
    endpoints: tuple[str, ...]
    key_digest: str = ""
    max_file_bytes: int = 200 << 20
    created_at: int = 0


def build_app(config: ApiConfig) -> Starlette:
    """Return the application."""
    api = _Api(config)
    routes = [
        ("/v1/files", api.create_file, "POST"),
        ("/v1/files", api.list_files, "GET"),
        ("/v1/files/{id}", api.get_file, "GET"),
        ("/v1/files/{id}", api.remove_file, "DELETE"),
        ("/v1/files/{id}/content", api.read_file, "GET"),
        ("/v1/batches", api.create_batch, "POST"),
        ("/v1/batches", api.list_batches, "GET"),
        ("/v1/batches/{id}", api.get_batch, "GET"),
        ("/v1/batches/{id}/cancel", api.cancel_batch, "POST"),
        ("/v1/models", api.list_models, "GET"),
        ("/v1/models/{id:path}", api.get_model, "GET"),
    ]
    return Starlette(
        routes=[
            *(Route(path, api.guarded(handler), methods=[verb]) for path, handler, verb in routes),
            Route("/healthz", _healthy, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_error},
    )


class _Api:
    """One method per operation; what they do with files is done in threads."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._files = FileStore(config.folder)
        self._batches = BatchStore(config.folder)

    def guarded(self, handler: Handler) -> Handler:
        """Return a handler that wants the key, and tells problems in OpenAI's form."""

        async def handle(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except Problem as problem:
                return JSONResponse(problem.body(), problem.status)
            except Exception:  # clients learn no more than that
                logger.exception("%s %s failed", request.method, request.url.path)
                unknown = Problem("the server could not do this", status=500, code="server_error")
                return JSONResponse(unknown.body(), 500)

        return handle

    def _check_key(self, request: Request) -> None:
        if not self._config.key_digest:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        is_right = hmac.compare_digest(digest, self._config.key_digest)
        if scheme.lower() != "bearer" or not is_right:
            raise Problem("the API key is missing or wrong", status=401, code="invalid_api_key")

    async def create_file(self, request: Request) -> Response:
        request = Request(request.scope, _limited(request.receive, self._max_upload))
        if int(request.headers.get("content-length") or 0) > self._max_upload:
            raise _too_large(self._max_upload)
        try:
            async with request.form(max_files=1, max_fields=_MAX_FIELDS) as form:
                upload, purpose = form.get("file"), form.get("purpose")
                others = sorted(set(form) - {"file", "purpose"})
                if others:
                    raise Problem(f"{others[0]} is not supported", param=others[0])
                if purpose != "batch":
                    raise Problem("purpose must be 'batch'", param="purpose")
                if not isinstance(upload, UploadFile):
                    raise Problem("file must be the content of a file", param="file")
                if (upload.size or 0) > self._config.max_file_bytes:
                    raise _too_large(self._config.max_file_bytes)
                record = await run_in_threadpool(
                    self._files.add,
                    upload.file,
                    filename=_last_step(upload.filename),
                    purpose="batch",
                )
        except (MultiPartException, HTTPException, AssertionError) as error:
            raise Problem("the body must be a form with a file and a purpose") from error
        return JSONResponse(record.view())

    @property
    def _max_upload(self) -> int:
        return self._config.max_file_bytes + _FORM_BYTES

    async def list_files(self, request: Request) -> Response:
        records = await run_in_threadpool(self._files.all)
        if request.query_params.get("order") == "asc":
            records.reverse()
        purpose = request.query_params.get("purpose")
        views = {
            record.id: record.view() for record in records if purpose in (None, record.purpose)
        }
        ids, has_more = page_of(list(views), request.query_params, default=10_000, most=10_000)
        return JSONResponse(listed([views[name] for name in ids], has_more=has_more))

    async def get_file(self, request: Request) -> Response:
        record = await run_in_threadpool(self._files.get, request.path_params["id"])
        return JSONResponse(record.view())

    async def remove_file(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        await run_in_threadpool(self._remove_file, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    def _remove_file(self, file_id: str) -> None:
        self._files.get(file_id)
        for batch in map(self._batches.get, self._batches.ids()):
            if batch.request.input_file_id == file_id and batch.status.status not in ENDED:
                raise Problem(
                    f"the file is the input of {batch.request.id}, which has not ended; cancel "
                    "that first",
                    status=409,
                    code="file_in_use",
                )
        self._files.remove(file_id)

    async def read_file(self, request: Request) -> Response:
        record = await run_in_threadpool(self._files.get, request.path_params["id"])
        headers = {"content-length": str(record.bytes), "x-content-type-options": "nosniff"}
        return StreamingResponse(
            self._files.chunks(record.id), media_type="application/octet-stream", headers=headers
        )

    async def create_batch(self, request: Request) -> Response:
        body = await _json_body(request)
        allowed = ("input_file_id", "endpoint", "completion_window", "metadata")
        for key, value in body.items():
            if key not in allowed and value is not None:
                raise Problem(f"{key} is not supported", param=key, code="unknown_parameter")
        window = body.get("completion_window", "24h")
        endpoint, known = body.get("endpoint"), self._config.endpoints
        if endpoint not in known:
            raise Problem(f"endpoint must be {' or '.join(known)} on this server", param="endpoint")
        options = {
            "endpoint": endpoint,
            "completion_window": window,
            "window_s": window_seconds(window),
            "metadata": checked_metadata(body.get("metadata")),
        }
        batch = await run_in_threadpool(self._add_batch, body.get("input_file_id"), options)
        return self._view(batch)

    def _add_batch(self, file_id: object, options: Mapping[str, Any]) -> Batch:
        if not isinstance(file_id, str):
            raise Problem("input_file_id must name a file", param="input_file_id")
        if self._files.get(file_id).purpose != "batch":
            raise Problem("the file must have the purpose 'batch'", param="input_file_id")
        return self._batches.add(input_file_id=file_id, **options)

    async def list_batches(self, request: Request) -> Response:
        ids = await run_in_threadpool(self._batches.ids)
        page, has_more = page_of(ids[::-1], request.query_params, default=20, most=100)
        batches = [await run_in_threadpool(self._batches.get, name) for name in page]
        views = [batch.view(self._config.models[0]) for batch in batches]
        return JSONResponse(listed(views, has_more=has_more))

    async def get_batch(self, request: Request) -> Response:
        return self._view(await run_in_threadpool(self._batches.get, request.path_params["id"]))

    async def cancel_batch(self, request: Request) -> Response:
        return self._view(await run_in_threadpool(self._cancel, request.path_params["id"]))

    def _cancel(self, batch_id: str) -> Batch:
        batch = self._batches.get(batch_id)
        if batch.status.status in ENDED:
            raise Problem(
                f"the batch is {batch.status.status} and cannot be cancelled",
                status=409,
                code="batch_ended",
            )
        self._batches.cancel(batch_id)
        return self._batches.get(batch_id)

    async def list_models(self, request: Request) -> Response:
        return JSONResponse(listed([self._model(name) for name in self._config.models]))

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name not in self._config.models:
            raise no_such("model", param="model")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        created = self._config.created_at
        return {"id": name, "object": "model", "created": created, "owned_by": "raybatch"}

    def _view(self, batch: Batch) -> Response:
        return JSONResponse(batch.view(self._config.models[0]))


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    problem = Problem("there is no such operation", status=status, code="not_found")
    return JSONResponse(problem.body(), status)


def _last_step(filename: str | None) -> str:
    """Return a name without folders, for clients that write files under the names they hear."""
    return re.split(r"[/\\]", filename or "")[-1][:255] or "batch.jsonl"


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """Return a source of a body that refuses to hand out more than so many bytes."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        return message

    return limited


def _too_large(max_bytes: int) -> Problem:
    return Problem(
        f"the file is larger than {max_bytes:,} bytes", status=413, param="file", code="too_large"
    )


async def _json_body(request: Request) -> dict[str, Any]:
    limited = Request(request.scope, _limited(request.receive, _MAX_BODY_BYTES))
    try:
        body = await limited.json()
    except (ValueError, RecursionError) as error:
        raise Problem("the body must be JSON") from error
    if not isinstance(body, dict):
        raise Problem("the body must be a JSON object")
    return body
