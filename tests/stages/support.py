"""A byte-level tokenizer folder, and a pool inside the test's process."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from raybatch.actors.wire.columns import RequestReader, combine_results, encode_completions
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.fake import FakeBackend, FakeOptions
from raybatch.inputs.source import Source
from raybatch.records.pool_stats import PoolStats
from raybatch.records.types import Completion, Sampling
from raybatch.stages.feeder import LLMStage, StageFeeder

EOS, USER, ASSISTANT, SYSTEM = range(256, 260)

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(
    folder: Path,
    *,
    has_chat_template: bool = True,
    has_bos: bool = False,
    frame: bool = False,
    has_types: bool = False,
) -> Path:
    """Write a tokenizer whose first 256 ids are the bytes.

    With a frame, texts are "<|system|> text <|eos|>", and pairs "<|system|> a <|eos|> b <|eos|>".
    """
    symbols = _byte_symbols()
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"])
    if has_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|system|> $A", special_tokens=[("<|system|>", SYSTEM)]
        )
    if frame:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|system|> $A <|eos|>",
            pair="<|system|> $A <|eos|> $B:1 <|eos|>:1",
            special_tokens=[("<|system|>", SYSTEM), ("<|eos|>", EOS)],
        )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
    }
    if has_types:
        options["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if has_chat_template:
        options["chat_template"] = _CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def _byte_symbols() -> list[str]:
    """Return the printable symbol of each byte, as byte-level BPE writes them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


IPC_WRITERS = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}


class LocalPool:
    """Answers like a pool handle, with one fake backend and no actors."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self._options = FakeOptions(**spec.backend.options)
        self._task = spec.backend.task
        self.batches: list[list[str]] = []
        self.requests: list[Any] = []
        self.copies: list[int] = []
        self.rows_outside = 0
        self.errors_outside: Counter[str] = Counter()

    def connect(self) -> None:
        """Do nothing: its backend is made per call."""

    def start(self) -> None:
        """Do nothing, for the same reason."""

    async def generate(
        self,
        table: pa.Table,
        samplings: Sequence[Sampling],
        *,
        client: str = "default",
        name: str = "",
        copies: Any = None,
        dedup_keys: bytes = b"",
        watch: Any = None,
    ) -> pa.Table:
        self.copies = [] if copies is None else copies.tolist()
        self.batches.append(table.column("row_id").to_pylist())
        backend = FakeBackend(self._options, self._task)
        requests = RequestReader(table, samplings).read(0, table.num_rows, 0)
        self.requests.extend(requests)
        backend.submit(requests)
        completions = []
        while backend.num_unfinished():
            completions.extend(backend.poll())
        failed = {c.request_id for c in completions if c.error}
        completions = [
            c for c in completions if c.request_id not in failed or (c.error and not c.sample_idx)
        ]
        results = encode_completions([c.request_id for c in completions], completions)
        return combine_results([results], np.ones(table.num_rows, np.int16))

    async def note_outside(
        self, num_rows: int, errors: Mapping[str, int], *, client: str = "default"
    ) -> None:
        self.rows_outside += num_rows
        self.errors_outside.update(errors)

    def stats(self, client: str = "default") -> PoolStats:
        return PoolStats()


class FullPool(LocalPool):
    """Its engines cannot hold any row."""

    async def generate(self, table: pa.Table, *_: Any, **options: Any) -> pa.Table:
        ids = list(range(table.num_rows))
        completions = [Completion(request_id=i, finish_reason="capacity") for i in ids]
        return combine_results([encode_completions(ids, completions)], np.ones(len(ids), np.int16))


def local(stage: type[StageFeeder]) -> type[StageFeeder]:
    """Return the stage with a pool inside this process."""
    return type("LocalStage", (stage,), {"pool": LocalPool(stage.pool.spec)})


def fake_stage(model: Path, *, replicas: int = 2, **options: Any) -> type[StageFeeder]:
    """Return a stage on the fake backend; `fake` holds the options of the backend."""
    backend = {"kind": "fake", "options": options.pop("fake", {})}
    options.setdefault("sampling", {"max_tokens": 4})
    return LLMStage(str(model), backend=backend, pool={"replicas": replicas}, **options)


def answer(stage: type[StageFeeder], batch: Any) -> pa.Table:
    """Return what one call of a feeder makes of a row batch."""
    return asyncio.run(stage()(batch))


def write_parquet(path: Path, table: pa.Table, **options: Any) -> None:
    """Write one file; `options` are those of pyarrow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)


def write_ipc(
    path: Path,
    table: pa.Table,
    kind: str = "file",
    *,
    batch_rows: int | None = None,
    compression: str | None = None,
) -> Path:
    """Write an Arrow IPC file or stream."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = IPC_WRITERS[kind]
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=options) as out:
        out.write_table(table, max_chunksize=batch_rows)
    return path


def rows_of(source: Source) -> list[Any]:
    """Return the column x of all rows."""
    tables = [table for task in source.tasks() for table in source.read(task)]
    return [value for table in tables for value in table.column("x").to_pylist()]
