import numpy as np
import pytest

from raybatch.records.types import Completion, Sampling
from raybatch.text.detokenizer import StopChecker, completion_text, find_stop, visible_token_ids
from raybatch.text.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import byte_level_bpe, llama_bpe, unigram

TOKENIZERS = {
    "bpe": Tokenizer(byte_level_bpe()),
    "llama": Tokenizer(llama_bpe()),
    "unigram": Tokenizer(unigram()),
}


class LetterTokenizer:
    """Token i is the i-th string; counts what it decodes."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.num_decoded = 0

    def decode(self, token_ids, skip_special_tokens=True, *, after=None):
        self.num_decoded += len(token_ids)
        return "".join(self.pieces[token_id] for token_id in token_ids)


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request):
    return TOKENIZERS[request.param]


def feed(checker, ids, slot=0):
    """Return the number of tokens read and the stop string found."""
    for position, token_id in enumerate(ids):
        found = checker.check(slot, int(token_id))
        if found is not None:
            return position + 1, found
    return len(ids), None


def plain_ids(tokenizer, text):
    ids = tokenizer.encode(text).tolist()
    return [token_id for token_id in ids if token_id not in tokenizer.special_ids]


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("the capital of France", "France"),
        ("the capital of France is", "ital of Fr"),
        ("a\n\nquestion", "\n\n"),
        ("from Köln to", "öl"),
        ("some 日本語 text", "本"),
        ("a 🙂 emoji", "🙂"),
        ("end.", "."),
    ],
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(text, stop, tokenizer):
    ids = plain_ids(tokenizer, text)
    lengths = range(len(ids) + 1)
    expected = next((n for n in lengths if stop in tokenizer.decode(ids[:n])), None)
    checker = StopChecker(lambda: tokenizer)
    checker.add(0, Sampling(stop=(stop,)))
    assert feed(checker, ids) == ((expected, stop) if expected else (len(ids), None))


def test_a_space_after_a_skipped_special_token_is_text():
    tokenizer = TOKENIZERS["llama"]
    ids = plain_ids(tokenizer, "text")
    checker = StopChecker(lambda: tokenizer)
    checker.add(0, Sampling(stop=(" text",)))
    ids = [*ids, tokenizer._fast.token_to_id("</s>"), *ids]
    assert feed(checker, ids) == (len(ids), " text")


def test_a_character_split_over_tokens_matches_when_it_is_whole():
    tokenizer = TOKENIZERS["llama"]
    fast = tokenizer._fast
    ids = [fast.token_to_id(f"<0x{byte:02X}>") for byte in "x🙂".encode()]
    checker = StopChecker(lambda: tokenizer)
    checker.add(0, Sampling(stop=("🙂",)))
    assert feed(checker, ids) == (5, "🙂")


def test_bytes_that_never_become_a_character_do_not_hold_text_back():
    tokenizer = TOKENIZERS["llama"]
    broken = [tokenizer._fast.token_to_id("<0xFF>")] * 20
    checker = StopChecker(lambda: tokenizer)
    checker.add(0, Sampling(stop=("Paris",)))
    ids = [*broken, *plain_ids(tokenizer, "text Paris")]
    assert feed(checker, ids) == (len(ids), "Paris")


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("c", "ab"), "ab"),
        (("bc", "abc"), "abc"),
        (("d", "xabcd"), "xabcd"),
        (("ab", "abc"), "ab"),
        (("abc", "ab"), "abc"),
    ],
    ids=str,
)
def test_of_several_matches_in_one_token_the_earliest_wins(stop, expected):
    checker = StopChecker(lambda: LetterTokenizer(["x", "abcd"]))
    checker.add(0, Sampling(stop=stop))
    assert feed(checker, [0, 1]) == (2, expected)


def test_text_before_the_last_token_is_not_matched_again():
    assert find_stop("aab", ("aa", "ab"), end_after=2) == "ab"


def test_a_match_within_min_tokens_does_not_count():
    checker = StopChecker(lambda: LetterTokenizer(["a", "b"]))
    checker.add(0, Sampling(stop=("a",), min_tokens=2))
    assert feed(checker, [0, 0, 1, 0, 0]) == (4, "a")


def test_a_match_may_begin_within_min_tokens():
    checker = StopChecker(lambda: LetterTokenizer(["a", "b"]))
    checker.add(0, Sampling(stop=("ab",), min_tokens=1))
    assert feed(checker, [0, 1]) == (2, "ab")


def test_a_slot_without_stop_strings_decodes_nothing():
    tokenizer = LetterTokenizer(["a"])
    checker = StopChecker(lambda: tokenizer)
    checker.add(0, Sampling())
    assert (checker.check(0, 0), tokenizer.num_decoded) == (None, 0)


@pytest.mark.parametrize("piece", ["ab", "\ufffd", ""], ids=["text", "broken", "skipped"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(piece):
    tokenizer = LetterTokenizer([piece])
    checker = StopChecker(lambda: tokenizer)
    checker.add(0, Sampling(stop=("never found",)))
    feed(checker, [0] * 1000)
    early = tokenizer.num_decoded
    feed(checker, [0] * 1000)
    assert tokenizer.num_decoded - early <= early + 100


def test_a_sequence_taken_up_elsewhere_remembers_half_a_match():
    tokenizer = LetterTokenizer(["S", "TO", "P"])
    checker = StopChecker(lambda: tokenizer)
    checker.add(3, Sampling(stop=("STOP",)), generated=np.array([0, 1], np.int32))
    assert checker.check(3, 2) == "STOP"


def test_a_removed_slot_is_not_watched():
    checker = StopChecker(lambda: LetterTokenizer(["a"]))
    checker.add(0, Sampling(stop=("a",)))
    checker.remove(0)
    assert checker.check(0, 0) is None


def test_special_tokens_count_as_text_only_when_they_are_kept():
    tokenizer = TOKENIZERS["bpe"]
    ids = [tokenizer._fast.token_to_id("<|im_end|>")]
    found = []
    for skip in (True, False):
        checker = StopChecker(lambda: tokenizer)
        checker.add(0, Sampling(stop=("im_end",), skip_special_tokens=skip))
        found.append(feed(checker, ids)[1])
    assert found == [None, "im_end"]


def stopped_text(text, **options):
    """Return what is shown of a text that stopped at END."""
    completion = Completion(
        request_id=0, token_ids=np.zeros(1, np.int32), finish_reason="stop", stop_reason="END"
    )
    sampling = Sampling(stop=("END",), **options)
    return completion_text(completion, sampling, LetterTokenizer([text]), ())


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one END")])
def test_text_is_cut_at_the_first_stop(include, expected):
    assert stopped_text("one END two END", include_stop_str_in_output=include) == expected


def test_text_without_the_stop_stays():
    assert stopped_text("one") == "one"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"finish_reason": "stop", "stop_reason": 1}, [0]),
        ({"finish_reason": "stop"}, [0]),
        ({"finish_reason": "stop", "stop_reason": "b"}, [0, 1]),
        ({"finish_reason": "length"}, [0, 1]),
    ],
    ids=str,
)
def test_only_a_stop_token_is_left_out_of_the_text(fields, expected):
    completion = Completion(request_id=0, token_ids=np.array([0, 1], np.int32), **fields)
    assert visible_token_ids(completion, Sampling()).tolist() == expected


@pytest.mark.parametrize(
    ("sampling", "ids", "stop_reason", "expected"),
    [
        (Sampling(stop=("a",)), [1, 0], "a", "b"),
        (Sampling(stop=("a",), include_stop_str_in_output=True), [1, 0], "a", "ba"),
        (Sampling(stop=("a",), min_tokens=2), [0, 1, 0], "a", "ab"),
        (Sampling(stop=("a",), min_tokens=1), [0, 2], "a", "ac"),
        (Sampling(stop_token_ids=(1,)), [0, 1], 1, "a"),
        (Sampling(stop_token_ids=(1,), include_stop_str_in_output=True), [0, 1], 1, "ab"),
    ],
    ids=range(6),
)
def test_the_text_of_a_completion_ends_where_it_stopped(sampling, ids, stop_reason, expected):
    completion = Completion(
        request_id=0,
        token_ids=np.array(ids, np.int32),
        finish_reason="stop",
        stop_reason=stop_reason,
    )
    tokenizer = LetterTokenizer(["a", "b", "cab"])
    assert completion_text(completion, sampling, tokenizer, ()) == expected
