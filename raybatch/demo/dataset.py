"""The demo dataset: Parquet files of documents x questions with columns that must pass through."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.demo.task import Question, make_document, make_questions

SCHEMA = pa.schema(
    [
        ("document", pa.string()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("doc_id", pa.int64()),
        ("priority", pa.int32()),
        ("asked_at", pa.timestamp("us", tz="UTC")),
        ("spans", pa.list_(pa.list_(pa.int32()))),
        ("origin", pa.struct([("city", pa.string()), ("page", pa.int16())])),
        ("comment", pa.string()),
        ("digest", pa.binary()),
    ]
)

# facts in a demo document: about 150 to 320 tokens
MIN_FACTS, MAX_FACTS = 18, 32

Row = dict[str, object]

_ROW_GROUP_ROWS = 2048
# rows that are shuffled together; bounds the writer's memory, whatever the size of the dataset
_SHUFFLE_ROWS = 65_536
_OVERLONG_REPEATS = 40
_BAD_UTF8 = b"The gate is \xff\xfe green."
_EPOCH = datetime(2024, 1, 1, tzinfo=UTC)


def write_dataset(
    path: str | Path,
    *,
    num_documents: int,
    questions_per_document: int,
    seed: int,
    num_files: int,
    include_bad_rows: bool = True,
) -> None:
    """Write the dataset as `part-00000.parquet`, ... under `path`; same arguments, same bytes.

    Rows are shuffled over all files within windows of about 65,000 rows, so the questions of one
    document lie far apart. Time is linear in the rows, memory does not grow with them. Files of the
    same names are replaced. `include_bad_rows` adds rows that cannot be answered: a null document,
    a null question and an over-long prompt in the first file, and invalid UTF-8 in the last one.

    Raises:
        ValueError: A count is less than one.
    """
    if min(counts := (num_documents, questions_per_document, num_files)) < 1:
        raise ValueError(
            f"num_documents, questions_per_document, num_files = {counts}: each must be at least 1"
        )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    files = [folder / f"part-{i:05}.parquet" for i in range(num_files)]
    writers = [pq.ParquetWriter(file, SCHEMA, compression="zstd") for file in files]
    try:
        rows = _rows(rng, num_documents, questions_per_document)
        _write_rows(writers, _shuffle(rows, rng))
        if include_bad_rows:
            writers[0].write_table(pa.Table.from_pylist(_bad_rows(rng), schema=SCHEMA))
            writers[-1].write_table(_invalid_utf8_row(rng))
    finally:
        for writer in writers:
            writer.close()


def _rows(rng: random.Random, num_documents: int, questions_per_document: int) -> Iterator[Row]:
    for doc_id in range(num_documents):
        document = make_document(rng, rng.randint(MIN_FACTS, MAX_FACTS))
        for question in make_questions(document, rng, questions_per_document):
            yield _row(rng, doc_id, document.text, question)


def _row(rng: random.Random, doc_id: int, document: str, question: Question) -> Row:
    """Fill the columns that the pipeline must pass through, with nulls at every level."""
    spans: list[list[int | None] | None] = []
    for _ in range(rng.randint(0, 3)):
        is_null = rng.random() < 0.2
        values = [] if is_null else [rng.randint(-9, 9) for _ in range(3)]
        span = [None if rng.random() < 0.2 else value for value in values]
        spans.append(None if is_null else span)
    return {
        "document": document,
        "question": question.text,
        "answer": question.answer,
        "doc_id": doc_id,
        "priority": rng.choice((None, 0, 1, 2**31 - 1)),
        "asked_at": _EPOCH + timedelta(microseconds=rng.randrange(10**14)),
        "spans": rng.choice((spans, spans, spans, None)),
        "origin": rng.choice((None, {"city": rng.choice((None, "Zürich", "")), "page": 7})),
        "comment": rng.choice((None, "", "naïve café", "日本 🙂")),
        "digest": rng.randbytes(rng.randint(0, 8)),
    }


def _shuffle(rows: Iterator[Row], rng: random.Random) -> Iterator[Row]:
    """Shuffle window by window."""
    while window := list(islice(rows, _SHUFFLE_ROWS)):
        rng.shuffle(window)
        yield from window


def _write_rows(writers: list[pq.ParquetWriter], rows: Iterator[Row]) -> None:
    while share := list(islice(rows, _ROW_GROUP_ROWS * len(writers))):
        for i, writer in enumerate(writers):
            if group := share[i :: len(writers)]:
                writer.write_table(pa.Table.from_pylist(group, schema=SCHEMA))


def _bad_rows(rng: random.Random) -> list[Row]:
    document = make_document(rng, MAX_FACTS)
    (question,) = make_questions(document, rng, 1)
    good = _row(rng, -1, document.text, question)
    return [
        {**good, "document": None},
        {**good, "question": None},
        {**good, "document": " ".join([document.text] * _OVERLONG_REPEATS)},
    ]


def _invalid_utf8_row(rng: random.Random) -> pa.Table:
    """Make one row whose document holds bytes that no UTF-8 decoder accepts."""
    (question,) = make_questions(make_document(rng, MIN_FACTS), rng, 1)
    table = pa.Table.from_pylist([_row(rng, -2, "", question)], schema=SCHEMA)
    offsets = pa.array([0, len(_BAD_UTF8)], pa.int32()).buffers()[1]
    broken = pa.StringArray.from_buffers(1, offsets, pa.py_buffer(_BAD_UTF8))
    return table.set_column(0, SCHEMA.field("document"), broken)
