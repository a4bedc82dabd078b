"""What `postprocess` is shown: a row that says where a missing column of ray.data.llm has gone."""

from collections.abc import Mapping
from typing import Any

_GONE: Mapping[str, str] = {
    "batch_uuid": "rows do not run in batches; row_id names a row",
    "generated_text": "the task makes numbers, in embeddings or score",
    "embeddings": "vectors are made by the tasks embed and classify; a score is in score",
    "metrics": "times of single requests are not kept; those of engines are in Ray's metrics",
    "params": "the row's own options are in sampling_params",
    "prompt_logprobs": "log probabilities of prompts are not computed",
    "request_id": "row_id names a row, in every run alike",
    "time_taken_llm": "times of single requests are not kept",
}


class AnsweredRow(dict[str, Any]):
    """A row as a dict; asked for a column that only ray.data.llm has, it says what is there."""

    def __missing__(self, name: str) -> Any:  # noqa: ANN401
        reason = _GONE.get(name)
        raise KeyError(name if reason is None else f"no column {name!r}: {reason}")
