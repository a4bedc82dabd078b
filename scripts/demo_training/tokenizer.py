"""The demo model's tokenizer: byte-level BPE with the task's words and a little English."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from raybatch.demo.task import make_document, make_questions

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# words with their leading space, single runs of digits, punctuation, line breaks
_SPLIT = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NUM_DOCUMENTS = 5000
_NUM_MERGED_TOKENS = 512
_ENGLISH = Path(__file__).with_name("english.txt")


def train_tokenizer(max_length: int, seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer; the same seed gives the same tokens.

    Merges are learned from the English text. Each word of the task is one token, which is looked up
    before any merge is tried.

    Args:
        max_length: The model's longest sequence in tokens, stored in the tokenizer's config.
        seed: Seed of the documents whose words become tokens.
    """
    learned = json.loads(_train_merges().to_str())["model"]
    vocab = dict(learned["vocab"])
    for word in _task_words(seed):
        vocab.setdefault(word, len(vocab))
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _train_merges() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_MERGED_TOKENS,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_ENGLISH.read_text(encoding="utf-8").splitlines(), trainer)
    return tokenizer


def _task_words(seed: int) -> list[str]:
    """List every word of the task as it occurs in texts, with or without a leading space."""
    rng = random.Random(seed)
    splitter = _pre_tokenizer()
    found = {word for word, _ in splitter.pre_tokenize_str("system\nuser\nassistant\n")}
    for _ in range(_NUM_DOCUMENTS):
        document = make_document(rng, 20)
        found.update(word for word, _ in splitter.pre_tokenize_str(document.text))
        for question in make_questions(document, rng, 40):
            text = f"\n\nQuestion: {question.text}\n{question.answer}"
            found.update(word for word, _ in splitter.pre_tokenize_str(text))
    return sorted(found)
