"""The demo command: writes the demo dataset, runs the main job over it, scores the answers."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import raybatch
from raybatch.demo.task import PROMPT, Question, make_document, make_questions
from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.report import RunReport

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

QUESTIONS_PER_DOCUMENT = 16
MAX_ANSWER_TOKENS = 64

_MARKER = ".raybatch-demo"
_ROWS_PER_FILE = 1024
_ROW_GROUP_ROWS = 2048
# rows that are shuffled together; bounds the writer's memory, whatever the size of the dataset
_SHUFFLE_ROWS = 65_536
_OVERLONG_REPEATS = 40
_BAD_UTF8 = b"The gate is \xff\xfe green."
_EPOCH = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """The report of the job and the score; rows with an expected answer and no error are scored."""

    report: RunReport
    rows_scored: int
    rows_right: int

    def to_text(self) -> str:
        """Return the report and the score; the score is rounded down."""
        score = 100 * self.rows_right // max(1, self.rows_scored) / 100
        return (
            f"{self.report.to_text()}\n"
            "the error rows are planted: the dataset has a few bad rows on purpose\n"
            f"right answers: {self.rows_right} of {self.rows_scored}\n"
            f"exact match: {score:.2f}"
        )


def run_demo(
    out: str | Path,
    *,
    rows: int,
    seed: int,
    replicas: int | None = None,
    start_ray: Callable[[], None] | None = None,
) -> DemoResult:
    """Write the dataset below `out`, answer it with the embedded model, and score it.

    An earlier demo in the folder is replaced; `rows`, the number of questions, is rounded up to
    whole documents. `start_ray` is called before Ray is used, if the job uses it.

    Raises:
        ConfigError: `out` holds something that is not a demo, or cannot be written.
    """
    if rows < 1:
        raise ConfigError(f"rows must be at least 1, got {rows}")
    folder = Path(out)
    questions = min(rows, QUESTIONS_PER_DOCUMENT)
    with error_context(f"{str(folder)!r} cannot be written; name another folder (--out)"):
        claim_folder(folder)
        write_dataset(
            folder / "prompts",
            num_documents=-(-rows // questions),
            questions_per_document=questions,
            seed=seed,
            num_files=-(-rows // _ROWS_PER_FILE),
            include_bad_rows=True,
        )
    stage = raybatch.LLMStage(
        "demo",
        prompt=PROMPT,
        sampling=raybatch.Sampling(temperature=0, max_tokens=MAX_ANSWER_TOKENS),
        pool=raybatch.PoolConfig(replicas=replicas),
    )
    job = raybatch.Job(source=str(folder / "prompts"), sink=str(folder / "answers"), stage=stage)
    report = job.run(start_ray=start_ray)
    scored, right = score_answers(report)
    return DemoResult(report=report, rows_scored=scored, rows_right=right)


def claim_folder(folder: Path) -> None:
    """Make `folder` an empty demo folder; ConfigError if it holds anything but a demo."""
    marker = folder / _MARKER
    if folder.exists() and not marker.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists and is not the folder of an earlier demo; give another one (--out)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
    for name in ("prompts", "answers"):
        shutil.rmtree(folder / name, ignore_errors=True)


def score_answers(report: RunReport) -> tuple[int, int]:
    """Return how many rows of a job could be scored, and how many of them are right."""
    scored = right = 0
    for name in report.output_files:
        path = Path(report.sink) / name
        table = pq.read_table(path, columns=["answer", "generated_text", "__inference_error__"])
        is_good = pc.equal(table.column("__inference_error__"), "")
        good = table.filter(pc.and_(is_good, pc.is_valid(table.column("answer"))))
        scored += good.num_rows
        right += exact_match(good.column("answer"), good.column("generated_text")).true_count
    return scored, right


def exact_match(
    expected: pa.Array | pa.ChunkedArray, generated: pa.Array | pa.ChunkedArray
) -> pa.BooleanArray:
    """Compare texts without the white space around them; where either is null, they differ.

    Example:
        >>> exact_match(pa.array(["Oak Hill", "red"]), pa.array([" Oak Hill", "blue"])).to_pylist()
        [True, False]
    """
    texts = (
        (one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one).cast(pa.string())
        for one in (expected, generated)
    )
    return pc.fill_null(pc.equal(*map(pc.utf8_trim_whitespace, texts)), False)


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
