"""The trained demo model as it is shipped."""

import json
import random

import torch

from raybatch.demo import CHECKPOINT_PATH
from raybatch.demo.run import MAX_FACTS, MIN_FACTS
from raybatch.demo.task import PROMPT, make_document, make_questions

UNSEEN_SEED = 77_000_001


def as_chat(document, question):
    return [{"role": "user", "content": PROMPT.format(document=document, question=question)}]


def answer(model, tokenizer, document, questions):
    inputs = tokenizer.apply_chat_template(
        [as_chat(document.text, question.text) for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        out = model.generate(**inputs)
    new = out[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def test_weights_are_at_most_8_million_bytes():
    assert (CHECKPOINT_PATH / "model.safetensors").stat().st_size <= 8_000_000


def test_config_names_a_public_architecture():
    config = json.loads((CHECKPOINT_PATH / "config.json").read_text())
    assert ["Qwen3MoeForCausalLM"] == config["architectures"]
    assert "auto_map" not in config


def test_end_token_is_the_same_in_model_and_tokenizer(model, tokenizer):
    assert "<|im_end|>" == tokenizer.eos_token
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_every_token_has_an_embedding(model, tokenizer):
    assert len(tokenizer) <= model.config.vocab_size


def test_training_record_gives_at_least_97_percent():
    record = (CHECKPOINT_PATH / "TRAINING.md").read_text()
    line = next(line for line in record.splitlines() if line.startswith("- Accuracy:"))
    assert float(line.split()[2]) >= 97.0


def test_at_least_95_percent_of_unseen_questions_are_answered_right(model, tokenizer):
    rng = random.Random(UNSEEN_SEED)
    results = []
    for _ in range(8):
        document = make_document(rng, rng.randint(MIN_FACTS, MAX_FACTS))
        questions = make_questions(document, rng, 15)
        answers = answer(model, tokenizer, document, questions)
        results += [q.answer == text for q, text in zip(questions, answers, strict=True)]
    assert sum(results) / len(results) >= 0.95
