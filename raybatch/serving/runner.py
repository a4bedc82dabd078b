"""Takes batches one after another, and writes what becomes of each."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raybatch.errors import CommitError, ConfigError, RaybatchError, error_text
from raybatch.openai_batch.batch_options import BatchOptions
from raybatch.openai_batch.conversion import Conversion
from raybatch.openai_batch.run import BatchRun
from raybatch.openai_batch.writing import BatchCounts, BatchFiles
from raybatch.serving.stores import ENDED, Batch, BatchStore, FileStore

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 2.0
_CANCELLED, _EXPIRED = "cancelled", "expired"
_CODES = {_CANCELLED: "batch_cancelled", _EXPIRED: "batch_expired"}


@dataclass(slots=True)
class BatchRunner:
    """Runs the batches below the folder of a server."""

    folder: str
    job: Mapping[str, Any]
    """Options of every job, as in a job file."""
    names: tuple[str, ...]
    is_ending: Callable[[], bool]
    """Whether the server ends, which lets a batch end early and go on later."""
    max_requests: int = 50_000
    # they do not change any more, and there may be many
    _ended: set[str] = field(default_factory=set)

    def step(self) -> bool:
        """Run the oldest batch that has not ended; return whether there was one."""
        store = BatchStore(self.folder)
        for batch_id in store.ids():
            if self.is_ending():
                return False
            if batch_id in self._ended:
                continue
            batch = store.get(batch_id)
            if batch.status.status not in ENDED:
                _OneBatch(self, store, batch).run()
                return True
            self._ended.add(batch_id)
        return False


class _OneBatch:
    def __init__(self, runner: BatchRunner, store: BatchStore, batch: Batch) -> None:
        self._runner = runner
        self._store = store
        self._files = FileStore(runner.folder)
        self._request = batch.request
        self._status = batch.status
        self._written_s = 0.0

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # of this batch, whatever it is; the next one may be fine
            is_known = isinstance(error, RaybatchError)
            logger.warning(
                "batch %s failed: %s", self._request.id, error_text(error), exc_info=not is_known
            )
            self._enter("failed", problem=str(error) if is_known else error_text(error))

    def _run(self) -> None:
        if not self._status.output_file_id:
            self._keep(output_file_id=self._files.new_id(), error_file_id=self._files.new_id())
        batch = self._batch()
        conversion = batch.convert()
        if not conversion.num_lines:
            raise ConfigError("the input file holds no request")
        if conversion.num_lines > self._runner.max_requests:
            raise ConfigError(
                f"the input file holds {conversion.num_lines} requests, "
                f"{self._runner.max_requests} are allowed; make several batches of it"
            )
        if self._status.status == "validating":
            counts = BatchCounts(
                num_requests=conversion.num_lines, num_failed=conversion.num_refused
            )
            self._enter("in_progress", counts=counts)
        reason = self._reason() or batch.answer(
            conversion, ending=self._reason, watch=lambda *rows: self._watch(conversion, *rows)
        )
        if reason in _CODES:
            self._end(reason, batch.close(_CODES[reason]))
        elif reason and self._runner.is_ending():
            logger.warning("batch %s goes on when the server is started", self._request.id)
        elif reason:
            raise CommitError(reason)
        else:
            self._enter("finalizing")
            self._end("completed", batch.finish(conversion))

    def _batch(self) -> BatchRun:
        runner, request, status = self._runner, self._request, self._status
        files = BatchFiles(
            source=self._files.path(request.input_file_id),
            output=self._files.path(status.output_file_id),
            errors=self._files.path(status.error_file_id),
            folder=self._store.run_folder(request.id),
        )
        options = BatchOptions(
            job=runner.job, names=runner.names, endpoint=request.endpoint, where="raybatch serve"
        )
        return BatchRun(files=files, options=options)

    def _reason(self) -> str | None:
        """Return why the batch has to end early."""
        if self._store.is_cancelled(self._request.id):
            return _CANCELLED
        if time.time() >= self._request.expires_at:
            return _EXPIRED
        return "the server ends" if self._runner.is_ending() else None

    def _watch(self, conversion: Conversion, num_answered: int, num_failed: int) -> None:
        now_s = time.monotonic()
        if now_s - self._written_s < _WRITE_EVERY_S:
            return
        self._written_s = now_s
        # rows, of which requests with several prompts have several, so never more than there are
        failed = min(conversion.num_refused + max(0, num_failed), conversion.num_lines)
        completed = min(max(0, num_answered), conversion.num_lines - failed)
        counts = replace(self._status.counts, num_completed=completed, num_failed=failed)
        self._keep(counts=counts)

    def _end(self, state: str, counts: BatchCounts) -> None:
        status = self._status
        for file_id, count, what in (
            (status.output_file_id, counts.num_completed, "output"),
            (status.error_file_id, counts.num_failed, "error"),
        ):
            if count:
                name = f"{self._request.id}_{what}.jsonl"
                self._files.register(file_id, filename=name, purpose="batch_output")
            else:
                self._files.remove(file_id)
        self._enter(state, counts=counts)

    def _enter(self, state: str, **changes: Any) -> None:  # noqa: ANN401
        logger.info("batch %s: %s", self._request.id, state)
        times = {**self._status.times, f"{state}_at": int(time.time())}
        self._keep(status=state, times=times, **changes)

    def _keep(self, **changes: Any) -> None:  # noqa: ANN401
        self._status = replace(self._status, **changes)
        self._store.write(self._request.id, self._status)
