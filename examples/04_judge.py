"""Let a model judge which of two answers is right.

The judge can write only one of the two candidates of a row: `overrides` takes `structured_outputs`
from a column, so each row has its own choices. The verdict needs no parsing, and the prompt does
not show the candidates in an order, so there is no position bias. For long answers, show them to an
instruct model as A and B, and let it choose between "A" and "B". Needs the extra `structured`
(`pip install '.[structured]'`).

    python examples/04_judge.py
"""

import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch import Job, LLMStage

MODEL = os.environ.get("MODEL", "demo")  # or a hub id, a checkpoint folder, a URI
SOURCE = "examples-out/judge/answers"
SINK = "examples-out/judge/verdicts"
PROMPT = "{document}\n\nQuestion: {question}"
SAMPLING = {"temperature": 0, "max_tokens": 16}

# leave this out for your own files
DOCUMENT = (
    "Ada Reed works as a painter. Bruno Berg lives in Oak Hill. The lamp costs 45 coins. The "
    "museum opens at 10:00. The concert takes place on Friday. The kettle is painted blue."
)
# question, answer of model one, answer of model two
ANSWERS = [
    ("What is the job of Ada Reed?", "painter", "baker"),
    ("Where does Bruno Berg live?", "Oak Hill", "Salt Bay"),
    ("How much does the lamp cost?", "54 coins", "45 coins"),
    ("On which day is the concert?", "Friday", "Sunday"),
    ("What colour is the kettle?", "blue", "red"),
]
Path(SOURCE).mkdir(parents=True, exist_ok=True)
rows = [
    {
        "document": DOCUMENT,
        "question": question,
        "one": one,
        "two": two,
        "choices": json.dumps({"choice": [one, two]}),
    }
    for question, one, two in ANSWERS
]
pq.write_table(pa.Table.from_pylist(rows), f"{SOURCE}/part-00000.parquet")

stage = LLMStage(
    MODEL, prompt=PROMPT, sampling=SAMPLING, overrides={"structured_outputs": "choices"}
)
Job(SOURCE, SINK, stage).run()

wins = Counter[str]()
for row in sorted(pq.read_table(SINK).to_pylist(), key=lambda row: row["row_id"]):
    winner = "one" if row["generated_text"] == row["one"] else "two"
    wins[winner] += 1
    print(f"{row['question']} {row['one']} or {row['two']}: {winner} ({row[winner]})")
print(f"model one wins {wins['one']}, model two {wins['two']}")

# Output:
# What is the job of Ada Reed? painter or baker: one (painter)
# Where does Bruno Berg live? Oak Hill or Salt Bay: one (Oak Hill)
# How much does the lamp cost? 54 coins or 45 coins: two (45 coins)
# On which day is the concert? Friday or Sunday: one (Friday)
# What colour is the kettle? blue or red: one (blue)
# model one wins 4, model two 1
