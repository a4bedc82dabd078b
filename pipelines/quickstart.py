"""Answer questions about documents: Parquet in, one map_batches, Parquet out.

Run it with `python pipelines/quickstart.py --rows 64 --out quickstart-out`.
"""

import argparse

import ray

from raybatch import LLMStage, Sampling
from raybatch.demo.dataset import write_dataset

MODEL = "demo"
PROMPT = "{document}\n\nQuestion: {question}"
SAMPLING = Sampling(temperature=0, max_tokens=64)
QUESTIONS_PER_DOCUMENT = 8
SEED = 1


def main() -> None:
    """Write prompts, answer them, and show a few answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--out", default="quickstart-out")
    options = parser.parse_args()

    write_dataset(
        f"{options.out}/prompts",
        num_documents=-(-options.rows // QUESTIONS_PER_DOCUMENT),
        questions_per_document=QUESTIONS_PER_DOCUMENT,
        seed=SEED,
        num_files=2,
        include_bad_rows=False,
    )
    ds = ray.data.read_parquet(f"{options.out}/prompts")
    ds = ds.map_batches(LLMStage(MODEL, prompt=PROMPT, sampling=SAMPLING))
    ds.write_parquet(f"{options.out}/answers")

    for row in ray.data.read_parquet(f"{options.out}/answers").take(5):
        print(f"{row['question']}  {row['generated_text']!r}, expected {row['answer']!r}")


if __name__ == "__main__":
    main()
