"""Rewrite titles with the functions and column names of ray.data.llm.

Run it with `python pipelines/title_rewrite.py --rows 32`. The embedded model only answers
questions about facts; name a real model (`--model`) for real titles.
"""

import argparse
import random

import ray

from raybatch import ProcessorConfig, build_processor

MODEL = "demo"
INSTRUCTION = "Rewrite this product title in plain words."
THINGS = ("lamp", "kettle", "chair", "tent", "violin")
WORDS = ("SUPER", "new!!", "2-pack", "best", "blue", "XL", "(sale)")
SEED = 4


def make_titles(count: int) -> list[dict]:
    """Make titles that need a rewrite; some of them are equal, as in real tables."""
    rng = random.Random(SEED)
    return [
        {"sku": i, "title": " ".join([*rng.sample(WORDS, 3), rng.choice(THINGS)])}
        for i in range(count)
    ]


def main() -> None:
    """Rewrite the titles and show a few."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()

    processor = build_processor(
        ProcessorConfig(model_source=options.model, concurrency=1),
        preprocess=lambda row: {
            "messages": [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": row["title"]},
            ],
            "sampling_params": {"temperature": 0.0, "max_tokens": 16},
        },
        postprocess=lambda row: {
            "sku": row["sku"],
            "title": row["title"],
            "rewritten": row["generated_text"],
        },
    )
    rows = processor(ray.data.from_items(make_titles(options.rows))).take_all()
    for row in sorted(rows, key=lambda row: row["sku"])[:5]:
        print(f"{row['sku']}: {row['title']!r} -> {row['rewritten']!r}")
    print(f"{len(rows)} titles")


if __name__ == "__main__":
    main()
