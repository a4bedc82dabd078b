"""Summarize every document of a dataset in one line.

The shortest complete job: it reads a folder of Parquet files and writes the same rows with the
column `generated_text`. You can start it again at any time: a stopped job resumes, and a finished
one prints its report. The demo model can only answer questions about facts, so its summary of a
document is the note that the document quotes.

    python examples/01_summarize.py
"""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch import Job, LLMStage

MODEL = os.environ.get("MODEL", "demo")  # or a hub id, a checkpoint folder, a URI
SOURCE = "examples-out/summarize/documents"  # a file, a folder or a glob; a path or a URI
SINK = "examples-out/summarize/summaries"
# for an instruct model: "{document}\n\nSummarize this in one sentence."
PROMPT = "{document}\n\nQuestion: What does the note on the door say?"
SAMPLING = {"temperature": 0, "max_tokens": 64}

# leave this out for your own files
DOCUMENTS = {
    "museum": "The museum opens at 10:00. Ada Reed works as a painter. The lamp costs 45 coins. "
    'The note on the door says "Return wet towels before noon then wash dusty boots with care".',
    "bakery": "Bruno Berg lives in Oak Hill. The bakery opens at 6:00. The oven belongs to Ada "
    'Reed. A note on the door reads "Pack fresh trays every morning". The kettle is painted blue.',
    "library": "The lecture takes place on Friday. The code for the safe is quiet 41. On the door "
    'hangs a note with the words "Sort heavy books in silence". The library opens at 9:00.',
}
table = pa.table({"place": list(DOCUMENTS), "document": list(DOCUMENTS.values())})
Path(SOURCE).mkdir(parents=True, exist_ok=True)
pq.write_table(table, f"{SOURCE}/part-00000.parquet")

stage = LLMStage(MODEL, prompt=PROMPT, sampling=SAMPLING, id_column="place")
report = Job(SOURCE, SINK, stage).run()

for row in pq.read_table(SINK).to_pylist():
    print(f"{row['place']}: {row['generated_text']}")
print(f"{report.rows_out} rows, {report.rows_failed} errors")

# Output:
# museum: Return wet towels before noon then wash dusty boots with care
# bakery: Pack fresh trays every morning
# library: Sort heavy books in silence
# 3 rows, 0 errors
