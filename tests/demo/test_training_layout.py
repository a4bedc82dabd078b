"""Training rows hold exactly the prompts of inference."""

import random

import pytest
import torch
from demo_training.batches import BatchShape, draw_document, make_batch
from demo_training.export import write_checkpoint
from demo_training.model import BLOCK, DemoModel, ModelShape
from transformers import AutoModelForCausalLM

from raybatch.demo.task import PROMPT, make_questions

SHAPE = BatchShape(num_rows=1, num_blocks=6, doc_len=224, min_facts=12, max_facts=12)


@pytest.fixture
def batch(tokenizer):
    return make_batch(tokenizer, random.Random(3), SHAPE)


@pytest.fixture
def prompts(tokenizer):
    """Prompt and answer ids of the pairs that the batch is drawn from."""
    rng = random.Random(3)
    document = draw_document(rng, SHAPE)
    pairs = []
    for question in make_questions(document, rng, 3 * SHAPE.num_blocks):
        content = PROMPT.format(document=document.text, question=question.text)
        chat = [{"role": "user", "content": content}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        ids = [*tokenizer(question.answer).input_ids, tokenizer.eos_token_id]
        pairs.append((rendered["input_ids"], ids))
    return pairs


def seen_tokens(batch, idx):
    """Ids and positions that the token at `idx` of row 0 attends to, in order of position."""
    doc_len = batch.masks.document.shape[1]
    block, place = divmod(idx - doc_len, BLOCK)
    at = torch.cat([torch.arange(doc_len), doc_len + block * BLOCK + torch.arange(BLOCK)])
    mask = torch.cat([batch.masks.document[0], batch.masks.own[0, block, place]])
    seen = at[mask == 0]
    return batch.ids[0, seen].tolist(), batch.positions[0, seen].tolist()


def test_each_answer_sees_its_inference_prompt_at_its_inference_positions(batch, prompts):
    seen_prompts = set()
    for pair_id in batch.pair_ids.unique().tolist():
        first = batch.chosen[batch.pair_ids == pair_id][0].item()
        ids, positions = seen_tokens(batch, first)
        assert list(range(len(ids))) == positions
        seen_prompts.add(tuple(ids))
    assert len(seen_prompts) > 6
    assert seen_prompts <= {tuple(prompt) for prompt, _ in prompts}


def test_labels_are_the_answer_and_the_end_token(batch, prompts):
    answers = {tuple(prompt): answer for prompt, answer in prompts}
    for pair_id in batch.pair_ids.unique().tolist():
        is_pair = batch.pair_ids == pair_id
        ids, _ = seen_tokens(batch, batch.chosen[is_pair][0].item())
        assert answers[tuple(ids)] == batch.labels[is_pair].tolist()


def test_training_model_equals_the_exported_checkpoint(tokenizer, batch, prompts, tmp_path):
    torch.manual_seed(0)
    model = DemoModel(ModelShape())
    model.init_embeddings(tokenizer)
    write_checkpoint(model, tokenizer, tmp_path)
    state = {name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    first = batch.chosen[batch.pair_ids == 0][0].item()
    ids, _ = seen_tokens(batch, first)
    with torch.inference_mode():
        logits, _ = model(batch.ids, batch.positions, batch.masks, batch.chosen)
        expected = exported(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, atol=1e-5, rtol=1e-4)
