"""From the options of a batch to what its requests may ask, and to a job for each form of them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from raybatch.backends.registry import type_of
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.openai_batch.bodies import COMPLETION_TOKENS, BodyRules
from raybatch.openai_batch.conversion import FormRows
from raybatch.openai_batch.requests import endpoints_of
from raybatch.records.types import Sampling
from raybatch.rows.options import StageConfig
from raybatch.rows.stage_forms import build_stage_config
from raybatch.rows.stage_model import find_model, max_model_len
from raybatch.text.tokenizer import Tokenizer

# where nothing says how long an answer can be
_UNKNOWN_ANSWER_TOKENS = 16_384
# what a batch file sets itself
_TAKEN_OF_STAGE = (
    "prompt",
    "messages",
    "tokenized_prompt",
    "system",
    "id_column",
    "overrides",
    "sampling_column",
    "query",
    "document",
    "pooling_column",
    "chat",
    "chat_template_kwargs_column",
    "output_prefix",
)
_TAKEN_OF_JOB = ("source", "sink", "output_order", "columns", "partition_by", "extend", "overwrite")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of the jobs that answer a batch, without what a batch file sets itself.

    Args:
        names: further names by which requests may call the model.
        endpoint: the only one that requests may ask; None takes all that there are.
        where: what the options are called in messages.

    Raises:
        ConfigError: an option is unknown, wrong, or set by the batch file itself.
    """

    job: Mapping[str, Any]
    names: tuple[str, ...] = ()
    endpoint: str | None = None
    where: str = "batch"

    def __post_init__(self) -> None:
        refused = [
            *(name for name in _TAKEN_OF_JOB if name in self.job),
            *(f"stage.{name}" for name in _TAKEN_OF_STAGE if name in self._of_stage),
            *(f"stage.sampling.{name}" for name in ("n", "logprobs") if name in self._sampling),
        ]
        if refused:
            raise ConfigError(
                f"{self.where}: {refused[0]!r} is no option of a batch, whose files and requests "
                "say it themselves; leave it out"
            )
        if type_of(self.stage.backend).is_endpoint:
            raise ConfigError(
                f"{self.where}: the backend 'openai' sends rows to an endpoint that has the Batch "
                "API itself, or answers datasets; take another backend for batch files"
            )
        if not endpoints_of(self.stage.task):
            raise ConfigError(
                f"{self.where}: batch files ask for text or for embeddings, and the task of the "
                f"stage is {self.stage.task!r}"
            )
        # what else is wrong with them is reported here, before anything is read
        stage = {"model": self.stage.model, **self._of_stage}
        Job.from_mapping({"source": "s", "sink": "t", **self.job, "stage": stage}, where=self.where)

    @cached_property
    def stage(self) -> StageConfig:
        """Return the options of the stage that all jobs share."""
        options = {name: value for name, value in self._of_stage.items() if name != "model"}
        model = self._of_stage.get("model", "demo")
        return build_stage_config(model, options, where=f"{self.where}: stage")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model."""
        folder = find_model(self.stage)
        assert folder is not None, "only an endpoint has no folder"
        return Tokenizer.load(folder)

    @cached_property
    def rules(self) -> BodyRules:
        """Return what requests may ask."""
        template = self.stage.chat_template
        return BodyRules(
            names=model_names(self.stage.model, self.names),
            endpoint=self.endpoint,
            reads_tools=self.tokenizer.template_reads("tools", chat_template=template),
            reads_reasoning_effort=self.tokenizer.template_reads(
                "reasoning_effort", chat_template=template
            ),
            chat=self._defaults(is_chat=True),
            completions=self._defaults(is_chat=False),
            task=self.stage.task,
        )

    @property
    def digest(self) -> str:
        """Return a digest of the rules, by which a later run sees that they are the same."""
        text = json.dumps(asdict(self.rules), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def job_of(self, rows: FormRows, *, source: str, sink: str) -> Job:
        """Return the job that answers the rows of one form."""
        form = rows.form
        prompts: dict[str, dict[str, Any]] = {
            "messages": {"messages": "messages", "chat_template_kwargs_column": "template_options"},
            "prompt": {"prompt": "{prompt}", "chat": False},
            "tokens": {"tokenized_prompt": "tokens"},
        }
        stage: dict[str, Any] = {
            **self._of_stage,
            "model": self.stage.model,
            **self._options_of(rows),
            "id_column": "id",
            **prompts[form.kind],
        }
        stage.pop("seed", None)  # it is in the sampling options
        mapping = {
            **self.job,
            "source": source,
            "sink": sink,
            "output_order": "input",
            "stage": stage,
        }
        return Job.from_mapping(mapping, where=self.where)

    def _options_of(self, rows: FormRows) -> dict[str, Any]:
        """Return the options of the stage that say how its rows are answered."""
        form = rows.form
        if self.stage.task != "generate":
            return {"pooling_column": "sampling"}
        sampling = replace(
            self.rules.chat if form.kind == "messages" else self.rules.completions,
            n=form.num_samples,
            logprobs=rows.num_logprobs if form.has_logprobs else None,
        )
        return {"sampling": sampling, "sampling_column": "sampling"}

    @property
    def _of_stage(self) -> Mapping[str, Any]:
        return self.job.get("stage") or {}

    @property
    def _sampling(self) -> Mapping[str, Any]:
        sampling = self._of_stage.get("sampling") or {}
        if isinstance(sampling, Sampling):
            raise ConfigError(f"{self.where}: give sampling as a mapping, not as {sampling!r}")
        return sampling

    def _defaults(self, *, is_chat: bool) -> Sampling:
        """Return the options of requests that say nothing: the user's, else those of OpenAI."""
        sampling = self.stage.sampling
        if "temperature" not in self._sampling:
            sampling = replace(sampling, temperature=1.0)
        if "max_tokens" in self._sampling:
            return sampling
        longest = COMPLETION_TOKENS
        if is_chat:
            model_len = max_model_len(self.stage, find_model(self.stage))
            longest = _UNKNOWN_ANSWER_TOKENS if model_len is None else model_len
        return replace(sampling, max_tokens=max(longest, sampling.min_tokens))


def model_names(model: str, others: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names by which requests may call a model: as the job does, and its last step."""
    last = model.rstrip("/").rpartition("/")[2]
    return tuple(dict.fromkeys([*others, model, last]))
