"""Small tokenizers of the families that checkpoints bring, trained in milliseconds."""

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The capital of France is Paris, and the question is: what is stated?",
    "user assistant system im_start im_end end start text s unk 0123456789",
    "Grüße aus Köln, 日本語 and 🙂 emoji; <|>[]{}()/\\ <s> </s> <|im_end|>",
] * 3

CHATML = (
    "{%- for m in messages -%}"
    "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# the template writes the begin token itself, and the tokenizer adds one to plain text
LLAMA = (
    "{{- bos_token -}}"
    "{%- for m in messages -%}"
    "{%- if m['role'] == 'system' and not loop.first -%}"
    "{{- raise_exception('system must come first') -}}"
    "{%- endif -%}"
    "{%- if m['role'] == 'assistant' -%}{{- ' ' + m['content'] + ' ' + eos_token -}}"
    "{%- else -%}{{- '[INST] ' + m['content'] + ' [/INST]' -}}{%- endif -%}"
    "{%- endfor -%}"
)


def byte_level_bpe():
    """Like Qwen: no begin token, ChatML, end of text outside the vocabulary of the model."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )


def llama_bpe():
    """Like Llama 2: begin token added to plain text, byte fallback, specials in the vocabulary."""
    fast = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast = _only_special(fast, {"<unk>", "<s>", "</s>"})
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=LLAMA,
    )


def unigram():
    """Like a converted sentencepiece model: the control tokens are pieces of the best score."""
    fast = Tokenizer(models.Unigram())
    fast.normalizer = normalizers.NFKC()
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=LLAMA,
    )


def _only_special(fast, names):
    """Make byte tokens plain entries of the vocabulary again, as converted checkpoints have it."""
    import json

    state = json.loads(fast.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in names]
    return Tokenizer.from_str(json.dumps(state))
