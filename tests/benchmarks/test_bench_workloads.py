import dataclasses

import pytest
from workloads_e2e import Workload, build, digest, from_json, longest, row_digest, scaled

SHARED = Workload(
    name="shared",
    kind="shared",
    num_requests=12,
    prompt_len=5,
    output_len=3,
    doc_len=20,
    queries_per_doc=4,
)
MIXED = Workload(name="mixed", kind="mixed", num_requests=50, prompt_len=40, output_len=16)
TAIL = Workload(name="tail", kind="tail", num_requests=512, prompt_len=4, output_len=6)
RANDOM = Workload(name="random", kind="random", num_requests=8, prompt_len=10, output_len=4)


def test_same_workload_gives_the_same_requests_on_every_machine():
    # literal on purpose: peers in other venvs must build these very requests
    assert [digest(build(w)) for w in (RANDOM, MIXED, SHARED, TAIL)] == [
        "ec313746a614a22a",
        "701d5760a9f346b4",
        "0c16a9168abe2e18",
        "3a8b107702a80f68",
    ]


def test_another_seed_gives_other_tokens():
    other = dataclasses.replace(RANDOM, seed=1)
    assert digest(build(other)) != digest(build(RANDOM))


def test_a_workload_survives_the_way_to_a_peer():
    assert from_json(dataclasses.asdict(SHARED)) == SHARED


def test_random_prompts_have_one_length_and_different_first_tokens():
    requests = build(RANDOM)
    assert {len(r.prompt_ids) for r in requests} == {10}
    assert len({r.prompt_ids[0] for r in requests}) == 8


def test_mixed_lengths_spread_around_their_mean():
    requests = build(MIXED)
    lengths = [len(r.prompt_ids) for r in requests]
    assert min(lengths) >= 5
    assert max(lengths) <= 75
    assert len(set(lengths)) > 20
    assert len({r.output_len for r in requests}) > 10


def test_a_tail_holds_most_tokens_in_a_tenth_of_the_rows():
    lengths = sorted(request.output_len for request in build(TAIL))
    assert lengths[0] == 1
    assert lengths[256] in range(5, 8)
    assert sum(lengths[-51:]) > 0.7 * sum(lengths)


def test_lengths_do_not_depend_on_the_vocabulary():
    smaller = dataclasses.replace(MIXED, vocab_size=64)
    lengths = [(len(r.prompt_ids), r.output_len) for r in build(MIXED)]
    assert [(len(r.prompt_ids), r.output_len) for r in build(smaller)] == lengths


def test_token_ids_stay_between_special_tokens_and_vocabulary():
    small = dataclasses.replace(RANDOM, vocab_size=20)
    assert {t for r in build(small) for t in r.prompt_ids} <= set(range(16, 20))


def test_queries_of_a_document_share_exactly_the_document():
    prompts = [r.prompt_ids for r in build(SHARED)]
    documents = [p[:20] for p in prompts]
    assert len(set(documents)) == 3
    for document in set(documents):
        firsts = [p[20] for p in prompts if p[:20] == document]
        assert len(set(firsts)) == 4


def test_sorted_order_is_lexicographic_and_shuffled_order_has_the_same_requests():
    in_order = build(SHARED)
    assert in_order == sorted(in_order, key=lambda r: r.prompt_ids)
    shuffled = build(dataclasses.replace(SHARED, order="shuffled"))
    assert shuffled != in_order
    assert sorted(shuffled, key=lambda r: r.prompt_ids) == in_order


def test_scaling_keeps_whole_documents():
    assert scaled(SHARED, 5).num_requests == 8


def test_half_a_document_is_refused():
    with pytest.raises(ValueError, match="not a multiple of queries_per_doc 4"):
        dataclasses.replace(SHARED, num_requests=10)


def test_longest_counts_prompt_and_output():
    assert longest(build(SHARED)) == 28


def test_row_digest_tells_order_apart_and_not_the_container():
    assert row_digest([1, 2]) == row_digest((1, 2))
    assert row_digest([1, 2]) != row_digest([2, 1])
