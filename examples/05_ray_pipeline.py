"""Put a model between the other steps of a Ray Data pipeline, twice.

`stage.apply(ds)` is a lazy step, with your filters and functions before and after it. The second
stage asks about the answer of the first; `output_prefix` separates their columns. Both have the
same model, so they share engines, and an engine that has the KV of a document from the first
question does not compute it again. Rows are written with Ray Data's guarantees; for exactly-once
output see `raybatch.read_parquet` (docs/how-to/your-own-pipeline.md).

    python examples/05_ray_pipeline.py
"""

import os
import random
import re

import pyarrow.parquet as pq
import ray

from raybatch import LLMStage
from raybatch.demo.task import make_document

MODEL = os.environ.get("MODEL", "demo")  # or a hub id, a checkpoint folder, a URI
SINK = os.path.abspath("examples-out/pipeline/answers")
SAMPLING = {"temperature": 0, "max_tokens": 16}
FIND_OWNER = "{document}\n\nQuestion: Who owns the {thing}?"
FIND_HOME = "{document}\n\nQuestion: Where does {owner_generated_text} live?"

# instead of ray.data.read_parquet("documents/")
DOCUMENTS = [make_document(random.Random(seed), 24).text for seed in range(12)]


def things(row: dict) -> list[dict]:
    """Make a row for each thing that has an owner in a document."""
    named = re.findall(r"The (\w+) (?:belongs to|is owned by)|owner of the (\w+)", row["document"])
    return [{"document": row["document"], "thing": one or other} for one, other in named]


def is_known(row: dict) -> bool:
    """Leave out error rows, and owners whose home is not in the document."""
    return row["home_generated_text"] not in (None, "not stated")


owner = LLMStage(MODEL, prompt=FIND_OWNER, sampling=SAMPLING, output_prefix="owner_")
home = LLMStage(MODEL, prompt=FIND_HOME, sampling=SAMPLING, output_prefix="home_")

ds = ray.data.from_items([{"document": text} for text in DOCUMENTS]).flat_map(things)
ds = owner.apply(ds)
ds = home.apply(ds)
ds = ds.filter(is_known).select_columns(["thing", "owner_generated_text", "home_generated_text"])
ds.write_parquet(SINK, mode="overwrite")

for row in pq.read_table(SINK).sort_by("thing").to_pylist():
    who, where = row["owner_generated_text"], row["home_generated_text"]
    print(f"The {row['thing']} belongs to {who}, who lives in {where}.")

# Output:
# The boat belongs to Bruno Weber, who lives in Oak Bay.
# The clock belongs to Rufus Jensen, who lives in Queens Bridge.
# The ladder belongs to Arlo Holm, who lives in Birch Creek.
# The lamp belongs to Yara Holm, who lives in Crow Creek.
# The lantern belongs to Igor Gale, who lives in Gold Bay.
