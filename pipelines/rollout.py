"""Rollouts: many samples of each prompt, with lengths that have a long tail, round after round.

Run it with `python pipelines/rollout.py --prompts 4 --samples 16 --rounds 2`. Each prompt is
computed once for all its samples, but for its last tokens. How long a sample becomes is drawn here,
a few being many times as long as the others, since the embedded model ends its answers early;
samples of a real model end where they end (leave out `ignore_eos`).
"""

import argparse
import random
from pathlib import Path

from rounds import run_round, summary_of

from raybatch import LLMStage, RunReport, Sampling
from raybatch.demo.task import make_document, make_questions

MODEL = "demo"
PROMPT = "{document}\n\nQuestion: {question}"
SAMPLING = Sampling(temperature=1.0, ignore_eos=True)
# the last block of a prompt is computed by each row
BLOCK_TOKENS = 16
FACTS_PER_DOCUMENT = 20
# tokens of a sample: their median and largest, and the spread of their logarithm
MEDIAN_TOKENS, MOST_TOKENS, SPREAD = 24, 384, 1.0
SEED = 6


def sample_rounds(
    stage: type, out: Path, *, rounds: int, prompts: int, samples: int
) -> tuple[list[int], list[RunReport]]:
    """Return the tokens of each sample, over all rounds, and the reports of the rounds."""
    rng, lengths, reports = random.Random(SEED), list[int](), []
    for number in range(rounds):
        rows = []
        for _ in range(prompts):
            document = make_document(rng, FACTS_PER_DOCUMENT)
            (question,) = make_questions(document, rng, 1)
            for _ in range(samples):
                tokens = round(rng.lognormvariate(0, SPREAD) * MEDIAN_TOKENS)
                rows.append(
                    {
                        "id": len(rows),
                        "document": document.text,
                        "question": question.text,
                        "tokens": max(1, min(MOST_TOKENS, tokens)),
                    }
                )
        # long samples begin early, so that none of them is alone at the end
        plan = {"expected_tokens_column": "tokens"}
        answered, report = run_round(out / f"round-{number:02d}", rows, stage, plan=plan)
        reports.append(report)
        print(summary_of(f"round {number}", [report]))
        lengths += [row["num_generated_tokens"] or 0 for row in answered]
    return lengths, reports


def main() -> None:
    """Sample prompts in rounds, and print what was computed and how long samples are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--out", default="rollout-out")
    options = parser.parse_args()

    stage = LLMStage(
        options.model,
        prompt=PROMPT,
        sampling=SAMPLING,
        overrides={"max_tokens": "tokens"},
        id_column="id",
        engine={"block_size_tokens": BLOCK_TOKENS},
        pool={"replicas": options.replicas},
    )
    lengths, reports = sample_rounds(
        stage,
        Path(options.out),
        rounds=options.rounds,
        prompts=options.prompts,
        samples=options.samples,
    )
    print(summary_of("all rounds", reports))
    middle = sorted(lengths)[len(lengths) // 2]
    print(f"half of the samples have up to {middle} tokens, the longest {max(lengths)}")


if __name__ == "__main__":
    main()
