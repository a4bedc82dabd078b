"""Summarize documents as one job with progress and a report.

Run it with `python pipelines/summarize.py --rows 32 --out summaries`. The embedded model only
answers questions about facts; name a real model (`--model`) for real summaries.
"""

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch import Job, LLMStage, Sampling
from raybatch.demo.task import make_document

MODEL = "demo"
MESSAGES = [
    {"role": "system", "content": "You write summaries of one sentence."},
    {"role": "user", "content": "{document}\n\nSummarize this."},
]
SAMPLING = Sampling(temperature=0, max_tokens=48)
FACTS_PER_DOCUMENT = 20
SEED = 2


def main() -> None:
    """Write documents, run the job over them, and print its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--out", default="summarize-out")
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()

    rng = random.Random(SEED)
    documents = [make_document(rng, FACTS_PER_DOCUMENT).text for _ in range(options.rows)]
    source = Path(options.out) / "documents"
    source.mkdir(parents=True, exist_ok=True)
    table = pa.table({"doc_id": range(options.rows), "document": documents})
    pq.write_table(table, source / "part-00000.parquet")

    stage = LLMStage(options.model, messages=MESSAGES, sampling=SAMPLING, id_column="doc_id")
    report = Job(source, f"{options.out}/summaries", stage, overwrite=True).run()
    print(report.to_text())


if __name__ == "__main__":
    main()
