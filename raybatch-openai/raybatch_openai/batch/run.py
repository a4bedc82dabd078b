"""Answers a batch file with a resumable job per form of requests."""

import hashlib
import json
import logging
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from raybatch.backends.registry import type_of
from raybatch.durable.storage import store_of
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.job.progress import ProgressPrinter
from raybatch.job.watching import ProgressCallback
from raybatch.records.pool_stats import PoolStats
from raybatch.records.types import Sampling
from raybatch.rows.options import StageConfig, build_stage_config
from raybatch.rows.stage_model import find_model, max_model_len
from raybatch.text.tokenizer import Tokenizer
from raybatch_openai.batch.conversion import RECORD, Conversion, FormRows, convert, read_conversion
from raybatch_openai.batch.files import check_free, check_output, remove_folder
from raybatch_openai.batch.requests import (
    COMPLETION_TOKENS,
    BodyRules,
    Refusal,
    endpoints_of,
    unexecuted,
)
from raybatch_openai.batch.writing import (
    AnswerWriter,
    BatchCounts,
    BatchFiles,
    LogprobTexts,
    write_answers,
)

logger = logging.getLogger(__name__)

RowWatch = Callable[[int, int], None]

# limit of an answer if the model's context is unknown
_UNKNOWN_ANSWER_TOKENS = 16_384
_NOT_OURS = "this batch did not write it: choose another file, or set --overwrite"
# options that a batch file sets
_PROMPT_OPTIONS = ("prompt", "messages", "tokenized_prompt", "system", "query", "document", "chat")
_COLUMN_OPTIONS = ("id_column", "sampling_column", "pooling_column", "chat_template_kwargs_column")
_TAKEN_OF_STAGE = (*_PROMPT_OPTIONS, *_COLUMN_OPTIONS, "overrides", "output_prefix")
_PROMPTS: Mapping[str, dict[str, Any]] = {
    "messages": {"messages": "messages", "chat_template_kwargs_column": "template_options"},
    "prompt": {"prompt": "{prompt}", "chat": False},
    "tokens": {"tokenized_prompt": "tokens"},
}
_TAKEN_OF_JOB = ("source", "sink", "output_order", "columns", "partition_by", "extend", "overwrite")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of the jobs of a batch; raises ConfigError for options that the batch file sets."""

    job: Mapping[str, Any]
    names: tuple[str, ...] = ()  # further names of the model in requests
    endpoint: str | None = None  # the only one that requests may name
    where: str = "batch"  # what messages call the options

    def __post_init__(self) -> None:
        refused = [
            *(name for name in _TAKEN_OF_JOB if name in self.job),
            *(f"stage.{name}" for name in _TAKEN_OF_STAGE if name in self._of_stage),
            *(f"stage.sampling.{name}" for name in ("n", "logprobs") if name in self._sampling),
        ]
        if refused:
            raise ConfigError(
                f"{self.where}: {refused[0]!r} cannot be set here: the batch file sets it"
            )
        if type_of(self.stage.backend).is_endpoint:
            raise ConfigError(
                f"{self.where}: the backend 'openai' cannot answer batch files; send them to the "
                "Batch API of the endpoint, or choose another backend"
            )
        if not endpoints_of(self.stage.task):
            raise ConfigError(
                f"{self.where}: batch files have no endpoint for stage.task={self.stage.task!r}; "
                "set generate or embed"
            )
        # raises for other invalid options, before anything is read
        stage = {"model": self.stage.model, **self._of_stage}
        Job.from_mapping({"source": "s", "sink": "t", **self.job, "stage": stage}, where=self.where)

    @cached_property
    def stage(self) -> StageConfig:
        """Options of the stage, shared by all jobs."""
        options = {name: value for name, value in self._of_stage.items() if name != "model"}
        model = self._of_stage.get("model", "demo")
        return build_stage_config(model, options, where=f"{self.where}: stage")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        folder = find_model(self.stage)
        assert folder is not None, "only an endpoint has no model folder"
        return Tokenizer.load(folder)

    @cached_property
    def rules(self) -> BodyRules:
        """What requests may contain."""

        def is_read(name: str) -> bool:
            return self.tokenizer.template_reads(name, chat_template=self.stage.chat_template)

        return BodyRules(
            names=model_names(self.stage.model, self.names),
            endpoint=self.endpoint,
            reads_tools=is_read("tools"),
            reads_reasoning_effort=is_read("reasoning_effort"),
            context=self._context,
            chat=self._defaults(is_chat=True),
            completions=self._defaults(is_chat=False),
            task=self.stage.task,
        )

    @property
    def digest(self) -> str:
        """Digest of `rules`, by which a later run detects a change."""
        text = json.dumps(asdict(self.rules), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def job_of(self, rows: FormRows, *, source: str, sink: str) -> Job:
        """Return the job that reads the rows of one form from `source` and writes to `sink`."""
        form = rows.form
        if self.stage.task == "generate":
            sampling = replace(
                self.rules.chat if form.kind == "messages" else self.rules.completions,
                n=form.num_samples,
                logprobs=rows.num_logprobs if form.has_logprobs else None,
            )
            options: dict[str, Any] = {"sampling": sampling, "sampling_column": "sampling"}
        else:
            options = {"pooling_column": "sampling"}
        stage = {**self._of_stage, "model": self.stage.model, "id_column": "id", **options}
        stage |= _PROMPTS[form.kind]
        stage.pop("seed", None)  # the sampling options have it
        of_batch = {"source": source, "sink": sink, "output_order": "input", "stage": stage}
        return Job.from_mapping({**self.job, **of_batch}, where=self.where)

    @property
    def _of_stage(self) -> Mapping[str, Any]:
        return self.job.get("stage") or {}

    @property
    def _sampling(self) -> Mapping[str, Any]:
        sampling = self._of_stage.get("sampling") or {}
        if isinstance(sampling, Sampling):
            raise ConfigError(f"{self.where}: sampling must be a mapping, got {sampling!r}")
        return sampling

    @property
    def _context(self) -> int | None:
        return max_model_len(self.stage, find_model(self.stage))

    def _defaults(self, *, is_chat: bool) -> Sampling:
        """Return the sampling defaults of requests: the user's, else OpenAI's."""
        sampling = self.stage.sampling
        if "temperature" not in self._sampling:
            sampling = replace(sampling, temperature=1.0)
        if "max_tokens" in self._sampling:
            return sampling
        longest = (self._context or _UNKNOWN_ANSWER_TOKENS) if is_chat else COMPLETION_TOKENS
        return replace(sampling, max_tokens=max(longest, sampling.min_tokens))


def model_names(model: str, others: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that requests may use for a model.

    They are `others`, the name of the model in the job, and the last component of this name.
    """
    last = model.rstrip("/").rpartition("/")[2]
    return tuple(dict.fromkeys([*others, model, last]))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRun:
    """Answers a batch file: `run` does everything, and resumes an unfinished earlier run."""

    files: BatchFiles
    options: BatchOptions

    def convert(self, *, overwrite: bool = False) -> Conversion:
        """Convert the batch file to rows, unless an earlier run did.

        `overwrite` first removes the folder of an earlier run.
        """
        if overwrite and store_of(self.files.folder).size(RECORD) is not None:
            read_conversion(self.files.folder)  # raises if it is not the record of a batch
            remove_folder(self.files.folder)
        rules, digest = self.options.rules, self.options.digest
        return convert(self.files.source, self.files.folder, rules=rules, digest=digest)

    def run(
        self,
        *,
        progress: ProgressCallback | ProgressPrinter | None = None,
        start_ray: Callable[[], None] | None = None,
        ending: Callable[[], str | None] | None = None,
        overwrite: bool = False,
    ) -> BatchCounts:
        """Answer all requests without an answer; then write the output file and the error file.

        Arguments as of `answer`. `overwrite` starts over instead of resuming an earlier run.
        """
        store, mark = store_of(self.files.folder), self._mark_of_errors
        for path, owner in ((self.files.output, RECORD), (self.files.errors, mark)):
            check_output(path)
            if not overwrite and store.size(owner) is None:
                check_free(path, _NOT_OURS)
        conversion = self.convert(overwrite=overwrite)
        store.create(mark, b"")
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
        """Run the unfinished jobs of a batch; return why they stopped early, or "".

        Args:
            conversion: the converted batch file.
            progress: shows or receives progress, as in `Job.run`.
            ending: called about every second; a result other than None stops the run and is
                the reason.
            start_ray: starts or connects to Ray, before a job needs it.
            watch: called about every second with the numbers of answered and of failed rows, in
                place of `progress`.
        """
        num_before = 0
        for rows in conversion.forms:
            logger.info(
                "a job of the batch answers %d rows of the form %s (prompts, samples, logprobs)",
                rows.num_rows,
                rows.form.name,
            )
        for rows in conversion.forms:
            folder = posixpath.dirname(conversion.rows_file(rows.form))
            source = posixpath.join(self.files.folder, folder)
            job = self.options.job_of(rows, source=source, sink=self.files.answers(rows.form))
            callback = progress
            if watch is not None:
                callback = _row_progress(watch, num_before, rows.num_rows)
            report = job.run(progress=callback, ending=ending, start_ray=start_ray)
            if report.exit_code() == 1:
                return report.stopped or "the output of a job is incomplete"
            num_before += rows.num_rows
        return ""

    @property
    def _mark_of_errors(self) -> str:
        """Name of the record that says that the file of errors belongs to this batch.

        The file of answers needs none: the folder has its name.
        """
        name = posixpath.relpath(self.files.errors, posixpath.dirname(self.files.folder) or ".")
        return f"errors-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"

    def finish(self, conversion: Conversion) -> BatchCounts:
        """Write the output file and the error file of a batch whose jobs have all finished."""
        return self._write(conversion, None)

    def close(self, code: str) -> BatchCounts:
        """Write both files of a batch that ended early; unfinished requests get the error `code`.

        `code` is "batch_expired" or "batch_cancelled".
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
