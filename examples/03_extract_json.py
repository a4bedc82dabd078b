"""Extract fields from every text as JSON that fits a schema.

With a JSON schema in `structured_outputs` every answer parses, has all fields, and has the right
types and enums: only the content can be wrong. In the output below it is wrong, because the demo
model was not trained on JSON and guesses; set MODEL to an instruct model. Give strings a
`maxLength`, and set `max_tokens` for the longest answer: a cut answer is no valid JSON. Needs the extra `structured`
(`pip install '.[structured]'`).

    MODEL=Qwen/Qwen3-0.6B python examples/03_extract_json.py
"""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch import Job, LLMStage

MODEL = os.environ.get("MODEL", "demo")  # or a hub id, a checkpoint folder, a URI
SOURCE = "examples-out/extract/texts"
SINK = "examples-out/extract/records"
SCHEMA = {
    "type": "object",
    "properties": {
        "day": {"enum": ["Monday", "Wednesday", "Friday", "Sunday"]},
        "price": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["day", "price"],
    "additionalProperties": False,
}
PROMPT = "{text}\n\nQuestion: Which day and which price does the text name? Answer as JSON."
SAMPLING = {"temperature": 0, "max_tokens": 384, "structured_outputs": {"json": SCHEMA}}

# leave this out for your own files
TEXTS = [
    "The auction takes place on Friday. The lamp costs 45 coins.",
    "The piano sold for 80 coins last year. The day of the fair is Sunday.",
    "The price of the clock is 52 coins. People come to the contest on Monday.",
]
Path(SOURCE).mkdir(parents=True, exist_ok=True)
pq.write_table(pa.table({"text": TEXTS}), f"{SOURCE}/part-00000.parquet")

stage = LLMStage(MODEL, prompt=PROMPT, sampling=SAMPLING)
Job(SOURCE, SINK, stage).run()

records = []
for row in pq.read_table(SINK).to_pylist():
    if row["finish_reason"] != "stop":  # cut by max_tokens, or an error row
        print(f"{row['text']!r}: {row['__inference_error__'] or 'cut'}")
        continue
    records.append(json.loads(row["generated_text"]))
    print(f"{row['text']!r}: {records[-1]}")
print(f"{len(records)} of {len(TEXTS)} answers are JSON with {SCHEMA['required']}")

# Output:
# 'The auction takes place on Friday. The lamp costs 45 coins.': {'day': 'Monday', 'price': 18}
# 'The piano sold for 80 coins last year. The day of the fair is Sunday.': {'day': 'Monday', 'price': 19}
# 'The price of the clock is 52 coins. People come to the contest on Monday.': {'day': 'Monday', 'price': 64}
# 3 of 3 answers are JSON with ['day', 'price']
