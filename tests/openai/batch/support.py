"""Batch files for tests, and the options of jobs on the fake backend."""

import json
from pathlib import Path
from typing import Any

from raybatch.records.types import Sampling
from raybatch_openai.batch.requests import CHAT, COMPLETIONS, EMBEDDINGS, BodyRules
from raybatch_openai.batch.run import BatchOptions, BatchRun
from raybatch_openai.batch.writing import BatchFiles

RULES = BodyRules(
    names=("m",), chat=Sampling(temperature=1.0, max_tokens=99), completions=Sampling(max_tokens=16)
)


def chat(custom_id: str, text: str = "hello", **body: Any) -> dict[str, Any]:
    """Return the line of a chat request."""
    messages = [{"role": "user", "content": text}]
    return line(custom_id, CHAT, {"model": "m", "messages": messages, "max_tokens": 4, **body})


def completion(custom_id: str, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    """Return the line of a completion request."""
    return line(custom_id, COMPLETIONS, {"model": "m", "prompt": prompt, "max_tokens": 4, **body})


def embedding(custom_id: str, text: Any = "hello", **body: Any) -> dict[str, Any]:
    """Return the line of a request for embeddings."""
    return line(custom_id, EMBEDDINGS, {"model": "m", "input": text, **body})


def line(custom_id: str, url: str, body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_batch(path: Path, *lines: dict[str, Any] | str) -> Path:
    """Write lines; texts are written as they are."""
    texts = [found if isinstance(found, str) else json.dumps(found) for found in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read_file(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of answers or errors."""
    return [json.loads(text) for text in path.read_text().split("\n")[:-1]]


def files_of(folder: Path) -> BatchFiles:
    """Return the files of a batch whose input is in.jsonl."""
    names = ("in.jsonl", "out.jsonl", "err.jsonl", "out.jsonl.raybatch")
    return BatchFiles(*(str(folder / name) for name in names))


def batch_run(
    folder: Path, model: Path, *, fake: dict[str, Any] | None = None, **job: Any
) -> BatchRun:
    """Return a batch on the fake backend; its jobs run without Ray by default."""
    job.setdefault("executor", "local")
    stage = {
        "model": str(model),
        "backend": {"kind": "fake", "options": {"max_model_len": 64, **(fake or {})}},
        "pool": {"replicas": 1},
        **job.pop("stage", {}),
    }
    options = BatchOptions(job={"stage": stage, **job}, names=("m",))
    return BatchRun(files=files_of(folder), options=options)
