"""The demo command: writes the demo dataset, runs the main job over it, scores the answers."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import raybatch
from raybatch.demo.dataset import write_dataset
from raybatch.demo.task import PROMPT
from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.report import RunReport

QUESTIONS_PER_DOCUMENT = 16
MAX_ANSWER_TOKENS = 64

_MARKER = ".raybatch-demo"
_ROWS_PER_FILE = 1024


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
