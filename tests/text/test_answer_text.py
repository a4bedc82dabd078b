"""Prompt and text together are what the tokenizer decodes of all tokens, however the text is made.

The authorities are the tokenizer's own `decode` of everything, and the stream by which vLLM makes
its text.
"""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from raybatch.records.types import Completion, Sampling
from raybatch.text.detokenizer import StopChecker, completion_text
from raybatch.text.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import CORPUS, byte_level_bpe, llama_bpe, unigram

BROKEN = "\ufffd"


def metaspace_first():
    """Like Mistral's: the blank at the begin of a text is none of its."""
    fast = Fast.from_str(llama_bpe().backend_tokenizer.to_str())
    fast.normalizer = None
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fast.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")


def without_begin():
    fast = Fast.from_str(llama_bpe().backend_tokenizer.to_str())
    fast.post_processor = None
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")


def word_piece():
    """Like BERT's: blanks are between words, and marks of a sentence have none before them."""
    fast = Fast(models.WordPiece(unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer()
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="[SEP]", unk_token="[UNK]")


MADE = (byte_level_bpe, llama_bpe, unigram, metaspace_first, without_begin, word_piece)
TOKENIZERS = {make.__name__: Tokenizer(make()) for make in MADE}
TEXTS = st.text(
    st.sampled_from("the captl of Frn.is,? \nüö日本🙂"), min_size=1, max_size=12
).filter(str.strip)


@st.composite
def answers(draw):
    """A tokenizer, the tokens of prompt and answer, and whether it skips special tokens."""
    tokenizer = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]
    prompt = tokenizer.encode(draw(TEXTS)).tolist()
    ids = st.integers(0, tokenizer.vocab_size - 1)
    prompt += draw(st.lists(ids, max_size=3) | st.just([]))
    written = tokenizer.encode(draw(TEXTS)).tolist()
    return tokenizer, prompt, draw(st.lists(ids, max_size=6)) + written, draw(st.booleans())


def decode(tokenizer, ids, skip):
    return tokenizer.hugging_face.backend_tokenizer.decode(ids, skip_special_tokens=skip)


def text_of(tokenizer, prompt, ids, skip, **fields):
    completion = Completion(
        request_id=0, token_ids=np.array(ids, np.int32), **{"finish_reason": "length"} | fields
    )
    sampling = Sampling(skip_special_tokens=skip, stop=("never found",))
    return completion_text(completion, sampling, tokenizer, np.array(prompt, np.int32))


@settings(max_examples=800, deadline=None)
@given(answers())
def test_prompt_and_text_are_what_the_tokenizer_decodes_of_both(answer):
    tokenizer, prompt, ids, skip = answer
    before, whole = decode(tokenizer, prompt, skip), decode(tokenizer, prompt + ids, skip)
    assume(BROKEN not in before + whole)
    assert before + text_of(tokenizer, prompt, ids, skip) == whole


@settings(max_examples=400, deadline=None)
@given(answers())
def test_the_text_is_that_of_the_stream_of_vllm(answer):
    tokenizer, prompt, ids, skip = answer
    # at an invalid byte sequence vLLM restarts, without the text before it
    assume(BROKEN not in decode(tokenizer, prompt, skip) + decode(tokenizer, prompt + ids, skip))
    stream = DecodeStream(ids=prompt, skip_special_tokens=skip)
    streamed = "".join(text for i in ids if (text := stream.step(tokenizer._fast, i)))
    assert text_of(tokenizer, prompt, ids, skip) == streamed


@settings(max_examples=400, deadline=None)
@given(answers(), st.data())
def test_a_text_that_is_cut_or_goes_on_is_a_part_of_the_whole(answer, data):
    tokenizer, prompt, ids, skip = answer
    place = data.draw(st.integers(0, len(ids)))
    first = text_of(tokenizer, prompt, ids[:place], skip)
    rest = text_of(tokenizer, prompt + ids[:place], ids[place:], skip)
    whole = text_of(tokenizer, prompt, ids, skip)
    assume(BROKEN not in first + rest + whole)
    assert first + rest == whole


@settings(max_examples=400, deadline=None)
@given(answers(), st.data())
def test_a_stop_string_is_found_in_the_text_that_is_shown(answer, data):
    tokenizer, prompt, ids, skip = answer
    before, lengths = decode(tokenizer, prompt, skip), range(1, len(ids) + 1)
    texts = [decode(tokenizer, prompt + ids[:n], skip).removeprefix(before) for n in lengths]
    assume(BROKEN not in before + texts[-1] and texts[-1])
    start = data.draw(st.integers(0, len(texts[-1]) - 1))
    stop = texts[-1][start : start + data.draw(st.integers(1, 4))]
    # text before an incomplete character is shown together with it
    shown_at = [n for n, text in enumerate(texts) if not text.endswith(BROKEN)]
    expected = next((n for n in shown_at if stop in texts[n]), None)
    checker = StopChecker(lambda: tokenizer)
    checker.add(0, Sampling(stop=(stop,), skip_special_tokens=skip), np.array(prompt, np.int32))
    found = next((n for n, i in enumerate(ids) if checker.check(0, i) is not None), None)
    assert found == expected
    shown = text_of(
        tokenizer, prompt, ids[: found + 1], skip, finish_reason="stop", stop_reason=stop
    )
    assert shown == texts[-1][: texts[-1].find(stop)]


def test_a_character_begun_in_the_prompt_is_whole_in_the_text():
    for name, text in (("byte_level_bpe", "x\u4eac"), ("llama_bpe", "x🙃")):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode(text).tolist()
        assert len(ids) > 3
        assert text_of(tokenizer, ids[:-1], ids[-1:], True) == text[1:]


def test_bytes_that_are_no_character_leave_others_whole():
    tokenizer = TOKENIZERS["llama_bpe"]
    byte = tokenizer._fast.token_to_id
    ids = [byte(f"<0x{b:02X}>") for b in "本本".encode()]
    assert text_of(tokenizer, [byte("<s>")], ids[:5], True) == f"本{BROKEN * 2}"
    prompt = [byte("<s>"), *ids[:3]]
    assert text_of(tokenizer, prompt, ids[3:4], True) == BROKEN


@pytest.mark.parametrize("name", ["llama_bpe", "metaspace_first"])
def test_tokens_of_the_midst_of_a_text_keep_their_blank(name):
    tokenizer = TOKENIZERS[name]
    blank, x = map(tokenizer._fast.token_to_id, ("\u2581", "t"))
    assert tokenizer.decode([blank, x]) == " t"
    assert tokenizer.decode([blank, x], after=()) == "t"
    begin = tokenizer.bos_id
    assert tokenizer.decode_batch([[x, blank, x], [begin, blank, x]]) == ["t t", "t"]
