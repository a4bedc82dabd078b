"""Write docs/reference/options.md and job.schema.json from the classes of options.

    python scripts/write_reference.py

tests/job/test_reference.py checks that the files are up to date.
"""

import dataclasses
import json
from collections import Counter
from pathlib import Path

from job_schema import job_schema

from raybatch.backends.openai.options import OpenAIOptions
from raybatch.backends.transformers.options import TransformersOptions
from raybatch.backends.vllm.args import VllmOptions
from raybatch.config import (
    BackendConfig,
    EngineConfig,
    LimitConfig,
    PlanConfig,
    PoolConfig,
    WaveConfig,
)
from raybatch.config.option import decided_by, documented, fields_of, is_hidden
from raybatch.job.config import JobConfig
from raybatch.records.pooling import Pooling
from raybatch.records.types import Sampling
from raybatch.rows.options import StageConfig

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

_INTRO = """# Options

Written by `python scripts/write_reference.py` from the classes that check the options.

`stage.engine.dtype` in a job file is `LLMStage(..., engine={"dtype": ...})` in Python and
`--set engine.dtype=...` in a shell, which needs no `stage.`. An unknown name is an error that names
the nearest option. None is `null` in YAML.

An option decides **answers** (a run that continues an output may not change it), **speed** (also
cost, memory, when a run ends) or **place** (where data is and engines run).

[job.schema.json](job.schema.json) is the JSON Schema of job files: a first line
`# yaml-language-server: $schema=<path>` makes editors complete and check them.
"""
_SECTIONS: dict[str, tuple[type, str]] = {
    "Job": (JobConfig, "The whole job file; `Job(source, sink, stage, ...)` takes the same."),
    "Plan": (PlanConfig, "Below `plan`, which may also be `auto` or `off`."),
    "Limits": (
        LimitConfig,
        "Below `limits`. At a limit no further unit starts, finished rows are kept. The same job "
        "started again continues, and its limits count from zero.",
    ),
    "Waves": (WaveConfig, "In the list `waves`: each runs rows of some status once more."),
    "Stage": (StageConfig, "Below `stage`; `LLMStage(model, ...)` takes the same."),
    "Sampling": (
        Sampling,
        "Below `stage.sampling`. Options decide answers; names and meanings follow vLLM. Defaults "
        "are greedy and short: the same answer on every run.",
    ),
    "Pooling": (Pooling, "Below `stage.pooling`. Options decide answers; None: the model decides."),
    "Engine": (EngineConfig, "Below `stage.engine`. vLLM takes the options that its page lists."),
    "Pool": (PoolConfig, "Below `stage.pool`."),
    "Backend": (BackendConfig, "Below `stage.backend`, which may also be the kind alone."),
    "Options of vLLM": (VllmOptions, "Below `stage.backend.options` of the kind `vllm`."),
    "Options of endpoints": (OpenAIOptions, "Below `stage.backend.options` of the kind `openai`."),
    "Options of transformers": (
        TransformersOptions,
        "Below `stage.backend.options` of the kind `transformers`.",
    ),
}


def reference() -> str:
    """Return the page with every option."""
    return "\n".join([_INTRO, *(_section(title, *of) for title, of in _SECTIONS.items())])


def schema() -> str:
    """Return the JSON Schema of job files as text."""
    return json.dumps(job_schema(), indent=1, sort_keys=True) + "\n"


def _section(title: str, cls: type, where: str) -> str:
    is_declared = hasattr(cls, "__pydantic_fields__")
    rows: list[tuple[str, str, str, str]] = []
    for field in dataclasses.fields(cls):
        option = fields_of(cls)[field.name] if is_declared else None
        if option is not None and is_hidden(option):
            continue
        is_nested = dataclasses.is_dataclass(option.annotation) if option else False
        decided = "(below)" if is_nested else decided_by(option).value if option else ""
        meaning = documented(cls).get(field.name, "").replace("|", "\\|")
        rows.append((field.name, _default(field), decided, meaning))
        if cls is StageConfig and field.name == "sampling":
            rows.append(("seed", "0", "answers", "Short for `sampling.seed`."))
            task = '"generate" makes text, "embed", "classify" and "score" make numbers.'
            rows.append(("task", '"generate"', "answers", task))
    # the text above the table says what most options decide; the other options are marked
    usual = Counter(decided for _, _, decided, _ in rows).most_common(1)[0][0]
    is_mixed = any(decided not in (usual, "(below)") for _, _, decided, _ in rows)
    if usual:
        where += (
            f" Options decide {usual} unless marked." if is_mixed else f" Options decide {usual}."
        )
    lines = []
    for name, default, decided, meaning in rows:
        mark = "" if decided in (usual, "(below)") else f"*{decided}*: "
        lines.append(f"| `{name}` | {default} | {mark}{meaning} |")
    head = "| option | default | meaning |\n|---|---|---|"
    return f"## {title}\n\n{where}\n\n{head}\n" + "\n".join(lines) + "\n"


def _default(field: "dataclasses.Field[object]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "none" if field.default_factory is dict else "(below)"
    if field.default is dataclasses.MISSING:
        return "(needed)"
    if isinstance(field.default, str):
        return f'"{field.default}"'
    written = {None: "none", (): "none", True: "true", False: "false"}
    is_plain = isinstance(field.default, bool | tuple) or field.default is None
    return written.get(field.default, str(field.default)) if is_plain else str(field.default)


def main() -> None:
    """Write both files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "options.md").write_text(reference())
    (FOLDER / "job.schema.json").write_text(schema())


if __name__ == "__main__":
    main()
