"""One batch from its file to its answers: a job for each form of requests, each resumable."""

import logging
import posixpath
from collections.abc import Callable
from dataclasses import dataclass

from raybatch.durable.storage import store_of
from raybatch.job.progress import ProgressPrinter
from raybatch.job.watching import ProgressCallback
from raybatch.openai_batch.answering import AnswerWriter, LogprobTexts
from raybatch.openai_batch.batch_options import BatchOptions
from raybatch.openai_batch.conversion import RECORD, Conversion, convert, read_conversion
from raybatch.openai_batch.files import remove_folder
from raybatch.openai_batch.requests import Refusal, unexecuted
from raybatch.openai_batch.writing import BatchCounts, BatchFiles, write_answers
from raybatch.records.types import PoolStats

logger = logging.getLogger(__name__)

RowWatch = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRun:
    """A batch file that is answered by jobs, in files that are there when all is done."""

    files: BatchFiles
    options: BatchOptions

    def convert(self, *, overwrite: bool = False) -> Conversion:
        """Read the batch file and write its requests as rows, unless that has been done.

        With `overwrite` what an earlier run has left is removed first.

        Raises:
            ConfigError: the file cannot be read, or the folder is that of another batch.
        """
        if overwrite and store_of(self.files.folder).size(RECORD) is not None:
            read_conversion(self.files.folder)  # refuses a record of anything else
            remove_folder(self.files.folder)
        options = self.options
        return convert(
            self.files.source, self.files.folder, rules=options.rules, digest=options.digest
        )

    def run(
        self,
        *,
        progress: ProgressCallback | ProgressPrinter | None = None,
        start_ray: Callable[[], None] | None = None,
        ending: Callable[[], str | None] | None = None,
        overwrite: bool = False,
    ) -> BatchCounts:
        """Answer every request that has no answer yet; write both files once all are done.

        Raises:
            ConfigError: found before any work starts, where it can be.
        """
        conversion = self.convert(overwrite=overwrite)
        stopped = self.answer(conversion, progress=progress, ending=ending, start_ray=start_ray)
        if stopped:
            return BatchCounts(num_requests=conversion.num_lines, stopped=stopped)
        return self.finish(conversion)

    def answer(
        self,
        conversion: Conversion,
        *,
        progress: ProgressCallback | ProgressPrinter | None = None,
        ending: Callable[[], str | None] | None = None,
        start_ray: Callable[[], None] | None = None,
        watch: RowWatch | None = None,
    ) -> str:
        """Run the jobs that are not done.

        Args:
            conversion: requests of the batch.
            progress: of each job, see `Job.run`.
            ending: called about every second; a text ends the run early, as a limit does.
            start_ray: of each job, see `Job.run`.
            watch: called about every second with the rows that have an answer and those that
                have an error, in place of `progress`.

        Returns:
            Why they have ended early; "" where they have not.
        """
        num_before = 0
        for rows in conversion.forms:
            logger.info("%d rows to answer: %s", rows.num_rows, rows.form.name)
        for rows in conversion.forms:
            folder = posixpath.dirname(conversion.rows_file(rows.form))
            source = posixpath.join(self.files.folder, folder)
            job = self.options.job_of(rows, source=source, sink=self.files.answers(rows.form))
            callback = (
                progress if watch is None else _row_progress(watch, num_before, rows.num_rows)
            )
            report = job.run(progress=callback, ending=ending, start_ray=start_ray)
            if report.exit_code() == 1:
                return report.stopped or "the output of a job is not complete"
            num_before += rows.num_rows
        return ""

    def finish(self, conversion: Conversion) -> BatchCounts:
        """Write both files of a batch whose jobs are all done.

        Raises:
            ConfigError: a file cannot be written.
        """
        return self._write(conversion, None)

    def close(self, code: str) -> BatchCounts:
        """Write both files of a batch that has ended early; what has no answer has an error.

        Raises:
            ConfigError: a file cannot be read or written.
        """
        return self._write(self.convert(), unexecuted(code))

    def _write(self, conversion: Conversion, missing: Refusal | None) -> BatchCounts:
        has_logprobs = any(rows.form.has_logprobs for rows in conversion.forms)
        writer = AnswerWriter(
            name=f"{conversion.input.digest}-{conversion.created}",
            created=conversion.created,
            logprobs=LogprobTexts(self.options.tokenizer if has_logprobs else None),
        )
        return write_answers(self.files, conversion, writer, missing=missing)


def _row_progress(watch: RowWatch, num_before: int, num_rows: int) -> ProgressCallback:
    def report(stats: PoolStats, num_to_do: int) -> None:
        failed = sum(stats.errors.values())
        watch(num_before + num_rows - num_to_do + stats.rows_done - failed, failed)

    return report
