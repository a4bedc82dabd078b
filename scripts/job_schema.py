"""Builds the JSON Schema of job files, for editors, from the classes that check job files."""

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit

from raybatch.backends.registry import known_backends
from raybatch.config.option import documented, fields_of, is_hidden
from raybatch.job.config import JobConfig
from raybatch.records.pooling import Pooling
from raybatch.records.types import Sampling
from raybatch.rows.options import StageConfig

_TEXT, _BOOL = {"type": "string"}, {"type": "boolean"}
# short forms of options in job files, in addition to the forms of their type
_SHORT_FORMS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("JobConfig", "plan"): [{"enum": ["auto", "off"]}, _BOOL],
    ("JobConfig", "columns"): [_TEXT],
    ("JobConfig", "partition_by"): [_TEXT],
    ("StageConfig", "backend"): [{"enum": list(known_backends())}],
    ("WaveConfig", "on"): [_TEXT],
    ("Sampling", "stop"): [_TEXT],
}


class _JobFiles(GenerateJsonSchema):
    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:  # noqa: ANN401
        raise PydanticOmit  # functions, which no file can hold


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file."""
    schema = TypeAdapter(JobConfig).json_schema(schema_generator=_JobFiles)
    parts = {"JobConfig": schema, **schema["$defs"]}
    for name in [name for name, field in fields_of(StageConfig).items() if is_hidden(field)]:
        del parts["StageConfig"]["properties"][name]
    task = parts["BackendConfig"]["properties"].pop("task")
    seed = {"type": "integer", "description": "Short for sampling.seed."}
    parts["StageConfig"]["properties"] |= {"task": task, "seed": seed}
    parts["BackendConfig"]["properties"]["kind"]["enum"] = list(known_backends())
    for cls in (Sampling, Pooling):
        for name, text in documented(cls).items():
            parts[cls.__name__]["properties"][name]["description"] = text
    for (part, name), forms in _SHORT_FORMS.items():
        known = parts[part]["properties"][name]
        above = {key: known.pop(key) for key in ("description", "default") if key in known}
        parts[part]["properties"][name] = {**above, "anyOf": [known, *forms]}
    _tidy(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "job file of raybatch",
        **schema,
    }


def _tidy(part: Any) -> None:  # noqa: ANN401
    """Drop titles that repeat names, and line breaks in descriptions."""
    if isinstance(part, list):
        for each in part:
            _tidy(each)
    if not isinstance(part, dict):
        return
    for name, each in part.items():
        if name == "properties":
            for option in each.values():
                option.pop("title", None)
        _tidy(each)
    if isinstance(part.get("description"), str):
        part["description"] = " ".join(part["description"].split())
