"""Measures the cost of feeding on one core: columns to requests, and results to columns.

python benchmarks/feeding.py
python benchmarks/feeding.py --rows 2048 --out result.json

Rows share 80 % of their prompts in groups of 16. Rates are prompt tokens per CPU second of this
process, the best of several runs in turn. "all" is the work of a feeder on a row: it reads the
prompt, makes the request, writes it as Arrow, and makes columns of the answer.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conditions
import jinja2.sandbox
import numpy as np
import pyarrow as pa
from models import CHAT_TEMPLATE, SPECIAL_TOKENS

from raybatch.actors.wire.columns import combine_results, encode_completions
from raybatch.records.types import Completion, Sampling
from raybatch.rows.finish import finish_rows
from raybatch.rows.options import StageConfig
from raybatch.rows.prepare import Prepared, prepare
from raybatch.rows.render import PromptReader
from raybatch.text.tokenizer import Tokenizer

ROWS_PER_GROUP, SHARED_CHARS, OWN_CHARS, OUTPUT_TOKENS = 16, 4800, 1200, 64
CALL_ROWS = 1024


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Train a byte-level BPE with the splits of GPT-4 and Qwen on texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"|[ ]?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[2])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_rows(texts: list[str], num_rows: int) -> pa.Table:
    """Return rows of which 16 consecutive ones share a document."""
    chance, whole = random.Random(0), "\n".join(texts)

    def some(length: int) -> str:
        start = chance.randrange(len(whole) - length)
        return whole[start : start + length]

    documents = [some(SHARED_CHARS) for _ in range(-(-num_rows // ROWS_PER_GROUP))]
    return pa.table(
        {
            "document": [documents[i // ROWS_PER_GROUP] for i in range(num_rows)],
            "question": [some(OWN_CHARS) for _ in range(num_rows)],
        }
    )


def best_s(run: Callable[[], object], num_runs: int) -> float:
    times = []
    for _ in range(num_runs):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def measure(folder: Path, table: pa.Table, num_runs: int) -> dict[str, Any]:
    """Return the number of prompt tokens, and prompt tokens per CPU second of each part."""
    prompt = "{document}\n\nQuestion: {question}"
    sampling = Sampling(temperature=0, max_tokens=OUTPUT_TOKENS)
    tokenizer = Tokenizer.load(folder)
    calls = [table.slice(i, CALL_ROWS) for i in range(0, table.num_rows, CALL_ROWS)]
    seconds: dict[str, float] = {}
    prepared: dict[str, list[Prepared]] = {}
    for name, is_chat in (("plain", False), ("chat", True)):
        config = StageConfig(model=str(folder), prompt=prompt, chat=is_chat, sampling=sampling)
        reader = PromptReader(config, tokenizer)

        def read(config: StageConfig = config, reader: PromptReader = reader) -> list[Prepared]:
            return [
                prepare(call, config=config, reader=reader, max_model_len=32_768) for call in calls
            ]

        prepared[name] = read()
        seconds[f"{name} prompts to requests"] = best_s(read, num_runs)
    requests = prepared["plain"]
    ids = [p.token_ids for part in requests for p in part.prompts]
    as_ids = pa.table({"ids": pa.array([x.tolist() for x in ids], pa.list_(pa.int32()))})
    config = StageConfig(model=str(folder), tokenized_prompt="ids", sampling=sampling)
    reader = PromptReader(config, tokenizer)
    of_ids = [as_ids.slice(i, CALL_ROWS) for i in range(0, table.num_rows, CALL_ROWS)]
    seconds["token ids to requests"] = best_s(
        lambda: [prepare(t, config=config, reader=reader, max_model_len=32_768) for t in of_ids],
        num_runs,
    )
    texts = [f"{d}\n\nQuestion: {q}" for d, q in zip(*table.to_pydict().values(), strict=True)]
    seconds["the tokenizer alone"] = best_s(
        lambda: [tokenizer.encode(text) for text in texts], num_runs
    )
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    chats = [[{"role": "user", "content": text}] for text in texts]
    seconds["jinja2 alone"] = best_s(
        lambda: [template.render(messages=chat, add_generation_prompt=True) for chat in chats],
        num_runs,
    )
    seconds["requests to Arrow"] = best_s(
        lambda: [_written(p.requests) for p in requests], num_runs
    )
    results = [_results(p) for p in requests]
    output = StageConfig(model=str(folder), prompt=prompt).output
    seconds["results to columns"] = best_s(
        lambda: [
            finish_rows(p, r, tokenizer=tokenizer, output=output)
            for p, r in zip(requests, results, strict=True)
        ],
        num_runs,
    )
    rest = seconds["requests to Arrow"] + seconds["results to columns"]
    seconds["all, plain"] = seconds["plain prompts to requests"] + rest
    seconds["all, chat"] = seconds["chat prompts to requests"] + rest
    seconds["all, token ids"] = seconds["token ids to requests"] + rest
    num_tokens = sum(map(len, ids))
    return {
        "rows": table.num_rows,
        "prompt_tokens": num_tokens,
        "tokens_per_s": {name: round(num_tokens / value) for name, value in seconds.items()},
    }


def _written(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _results(prepared: Prepared) -> pa.Table:
    chance = np.random.default_rng(0)
    completions = [
        Completion(
            request_id=i,
            token_ids=chance.integers(300, 30_000, OUTPUT_TOKENS).astype(np.int32),
            finish_reason="length",
        )
        for i in range(len(prepared.rows))
    ]
    rows = np.arange(len(completions), dtype=np.int32)
    batch = encode_completions(rows, completions)
    return combine_results([batch], np.ones(len(rows), np.int16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # text that every host has: the sources of Python's standard library
    files = sorted(Path(random.__file__).parent.glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), texts)
        found = measure(Path(folder), make_rows(texts, args.rows), args.runs)
    print(f"{found['rows']} rows of {found['prompt_tokens'] / found['rows']:.0f} tokens")
    for name, rate in found["tokens_per_s"].items():
        print(f"{name:<28} {rate:>12,} tokens per CPU second")
    conditions.write_result(args.out, "feeding.py", **found)


if __name__ == "__main__":
    main()
