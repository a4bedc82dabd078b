"""Recursive self-aggregation: answers of one round are put into the prompts of the next.

Run it with `python pipelines/rsa.py --questions 8 --rounds 3 --candidates 8 --aggregated 4`. Every
question has N candidates; each prompt of the next round shows K of them, drawn at random, and the
last round is decided by majority. The document comes first in the prompt: it is computed once for
all candidates. Source: BatchGen, section 6.2 (8K tokens per round there, K:1 of prompt to output).
"""

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rounds import run_round, summary_of

from raybatch import LLMStage, RunReport, Sampling
from raybatch.demo.task import Question, make_document, make_questions

MODEL = "demo"
PROMPT = "{document}\n\n{notes}Question: {question}"
SAMPLING = Sampling(temperature=0.7, max_tokens=48)
# the last block of a prompt is computed by each row
BLOCK_TOKENS = 16
FACTS_PER_DOCUMENT = 20
SEED = 5


def aggregate(
    stage: type,
    questions: Sequence[tuple[str, Question]],
    out: Path,
    *,
    rounds: int,
    candidates: int,
    aggregated: int,
) -> tuple[list[str], list[RunReport]]:
    """Return the answer to each question about a document, and the reports of the rounds."""
    notes, answers, reports = [""] * (len(questions) * candidates), [""], []
    for number in range(rounds):
        rows = [
            {"id": i, "document": document, "question": question.text, "notes": notes[i]}
            for i, (document, question) in enumerate(
                pair for pair in questions for _ in range(candidates)
            )
        ]
        answered, report = run_round(out / f"round-{number:02d}", rows, stage)
        reports.append(report)
        print(summary_of(f"round {number}", [report]))
        answers = [row["generated_text"] or "" for row in answered]
        # the same draws in every run, so that a started round resumes
        rng = random.Random(f"{SEED}-{number}")
        notes = []
        for start in range(0, len(answers), candidates):
            own = answers[start : start + candidates]
            drawn = (rng.sample(own, aggregated) for _ in range(candidates))
            notes += [f"Earlier answers: {'; '.join(some)}\n\n" for some in drawn]
    voted = (answers[start : start + candidates] for start in range(0, len(answers), candidates))
    return [Counter(own).most_common(1)[0][0] for own in voted], reports


def main() -> None:
    """Ask questions about documents in rounds, and print computed tokens and right answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--aggregated", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--out", default="rsa-out")
    options = parser.parse_args()

    rng = random.Random(SEED)
    documents = [make_document(rng, FACTS_PER_DOCUMENT) for _ in range(options.questions)]
    questions = [(d.text, question) for d in documents for question in make_questions(d, rng, 1)]
    stage = LLMStage(
        options.model,
        prompt=PROMPT,
        sampling=SAMPLING,
        id_column="id",
        engine={"block_size_tokens": BLOCK_TOKENS},
        pool={"replicas": options.replicas},
    )
    answers, reports = aggregate(
        stage,
        questions,
        Path(options.out),
        rounds=options.rounds,
        candidates=options.candidates,
        aggregated=options.aggregated,
    )
    print(summary_of("all rounds", reports))
    pairs = zip(answers, questions, strict=True)
    right = sum(answer.strip() == question.answer for answer, (_, question) in pairs)
    print(f"{right} of {len(questions)} answers are right")


if __name__ == "__main__":
    main()
