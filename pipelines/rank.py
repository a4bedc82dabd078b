"""Rank documents for each query: every query is asked of every document.

Run it with `python pipelines/rank.py --documents 8`. The document comes first in the prompt, so
that its KV is computed once and serves all queries. A document's score is the model's mean log
probability of its answer; "not stated" ranks last.
"""

import argparse
import random

import numpy as np
import ray

from raybatch import LLMStage, Sampling
from raybatch.demo.task import make_document, make_questions

MODEL = "demo"
PROMPT = "{document}\n\nQuestion: {query}"
SAMPLING = Sampling(temperature=0, max_tokens=48, logprobs=1)
FACTS_PER_DOCUMENT = 20
QUERIES = 3
TOP = 2
SEED = 3


def score(row: dict) -> dict:
    """Add the score of one document for one query."""
    if row["__inference_error__"] or row["generated_text"].strip() == "not stated":
        return {**row, "score": -np.inf}
    chosen = [position["logprobs"][0] for position in row["logprobs"]]
    return {**row, "score": float(np.mean(chosen))}


def main() -> None:
    """Make documents and queries, ask all pairs, and print the best documents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=8)
    options = parser.parse_args()

    rng = random.Random(SEED)
    documents = [make_document(rng, FACTS_PER_DOCUMENT) for _ in range(options.documents)]
    queries = [make_questions(rng.choice(documents), rng, 1)[0].text for _ in range(QUERIES)]
    pairs = [
        {"doc_id": i, "document": d.text, "query": q}
        for i, d in enumerate(documents)
        for q in queries
    ]
    ds = ray.data.from_items(pairs).map_batches(LLMStage(MODEL, prompt=PROMPT, sampling=SAMPLING))
    rows = ds.map(score).take_all()

    for query in queries:
        found = [row for row in rows if row["query"] == query]
        print(query)
        for row in sorted(found, key=lambda row: -row["score"])[:TOP]:
            print(f"  document {row['doc_id']}: {row['score']:.3f} {row['generated_text']!r}")


if __name__ == "__main__":
    main()
