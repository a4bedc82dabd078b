"""Give every text one label of a closed list.

With `structured_outputs={"choice": LABELS}` the model can write only one of the labels, so you need
not parse or clean the answer. Add a label for texts that fit no other: without "not stated" the
model would have to guess. The demo model reads facts, so here the labels are the days on which
something takes place. Needs the extra `structured` (`pip install '.[structured]'`).

    python examples/02_classify.py
"""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch import Job, LLMStage

MODEL = os.environ.get("MODEL", "demo")  # or a hub id, a checkpoint folder, a URI
SOURCE = "examples-out/classify/texts"
SINK = "examples-out/classify/labels"
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
LABELS = [*DAYS, "not stated"]
PROMPT = "{text}\n\nQuestion: On which day is the {event}?"
SAMPLING = {"temperature": 0, "max_tokens": 8, "structured_outputs": {"choice": LABELS}}

# leave this out for your own files; `expected` is only for the score
TEXTS = [
    ("concert", "Friday", "The theatre opens at 19:00. The concert takes place on Friday."),
    ("dance", "Sunday", "The dance takes place on Sunday. The lecture takes place on Monday."),
    ("lecture", "Monday", "The dance takes place on Sunday. The lecture takes place on Monday."),
    (
        "wedding",
        "Saturday",
        "People come to the wedding on Saturday. The piano belongs to Ida Abel.",
    ),
    ("auction", "not stated", "The clock costs 52 coins. The day of the fair is Wednesday."),
    ("fair", "Wednesday", "The clock costs 52 coins. The day of the fair is Wednesday."),
]
table = pa.table(dict(zip(("event", "expected", "text"), zip(*TEXTS, strict=True), strict=True)))
Path(SOURCE).mkdir(parents=True, exist_ok=True)
pq.write_table(table, f"{SOURCE}/part-00000.parquet")

stage = LLMStage(MODEL, prompt=PROMPT, sampling=SAMPLING)
Job(SOURCE, SINK, stage).run()

rows = pq.read_table(SINK).to_pylist()
for row in sorted(rows, key=lambda row: row["row_id"]):
    print(f"{row['event']}: {row['generated_text']}")
right = sum(row["generated_text"] == row["expected"] for row in rows)
print(f"{right} of {len(rows)} labels are right")

# Output:
# concert: Friday
# dance: Sunday
# lecture: Monday
# wedding: Saturday
# auction: not stated
# fair: Wednesday
# 6 of 6 labels are right
