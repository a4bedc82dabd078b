import dataclasses
from collections import Counter
from itertools import pairwise

from prefix_orders import LARGEST_BLOCK, PROMPT_ORDERS, kv_tokens_for, rows_in_order, sharing
from prefix_suites import W1, W2, W10, ZERO, classes, w1
from workloads_e2e import build, digest, from_json

SMALL = classes("small", (3, 4, 40, 8, 2), (2, 2, 16, 5, 3))


def test_same_workload_gives_the_same_requests_on_every_machine():
    # literal on purpose: peers in other venvs must build these very requests
    assert [digest(build(w)) for w in (SMALL, W2, W10)] == [
        "50f48736a5659836",
        "91f73bd7231d6ed7",
        "b8a3f12e7dbfb8fd",
    ]


def test_a_workload_of_classes_survives_the_way_to_a_peer():
    assert from_json(dataclasses.asdict(SMALL)) == SMALL


def test_members_of_a_group_share_exactly_the_prefix():
    prompts = [request.prompt_ids for request in build(SMALL)]
    by_prefix = Counter(p[:40] if len(p) == 48 else p[:16] for p in prompts)
    assert sorted(by_prefix.values()) == [2, 2, 4, 4, 4]
    for prefix in by_prefix:
        firsts = [p[len(prefix)] for p in prompts if p[: len(prefix)] == prefix]
        assert len(set(firsts)) == len(firsts)


def test_every_sharing_degree_of_w1_has_as_many_requests_and_tokens():
    shapes = {(len(build(w1(sd, 128))), sharing(w1(sd, 128), 16).prompt_tokens) for sd in (2, 64)}
    assert shapes == {(128, 128 * 288)}


def test_zero_share_has_prompts_as_long_and_nothing_in_common():
    facts = sharing(ZERO, 1)
    assert {len(request.prompt_ids) for request in build(ZERO)} == {288}
    assert (facts.shared_tokens, facts.saveable_tokens) == (0, 0)


def test_random_trees_hold_what_breaks_planners():
    prompts = [request.prompt_ids for request in build(W10)]
    assert len(prompts) == W10.num_requests
    assert max(Counter(prompts).values()) > 1
    assert min(map(len, prompts)) < 16
    assert any(b[: len(a)] == a for a in prompts for b in prompts if len(a) < len(b))


def test_every_order_is_a_permutation_and_only_shuffled_ones_are_random():
    for order in PROMPT_ORDERS:
        assert sorted(rows_in_order(SMALL, order)) == list(range(16))
    requests = build(SMALL)
    prompts = [requests[row].prompt_ids for row in rows_in_order(SMALL, "sorted")]
    assert prompts == sorted(prompts)


def test_group_order_keeps_members_together_and_shuffles_the_groups():
    requests = build(W1)
    heads = [requests[row].prompt_ids[:256] for row in rows_in_order(W1, "groups")]
    borders = [i for i in range(1, len(heads)) if heads[i] != heads[i - 1]]
    assert borders == list(range(16, 1024, 16))
    assert heads[::16] != sorted(heads[::16])


def test_shuffled_order_spreads_the_groups():
    requests = build(W1)
    heads = [requests[row].prompt_ids[0] for row in rows_in_order(W1, "shuffled")]
    neighbours = sum(a == b for a, b in pairwise(heads))
    assert neighbours < 40


def test_sharing_agrees_with_counting_every_prefix():
    part = dataclasses.replace(W10, num_requests=80)
    requests = build(part)
    block_size = 16
    counts = Counter(r.prompt_ids[:n] for r in requests for n in range(1, len(r.prompt_ids) + 1))
    blocks = Counter(
        r.prompt_ids[: n * block_size]
        for r in requests
        # the last token of a prompt is computed in any case
        for n in range(1, (len(r.prompt_ids) - 1) // block_size + 1)
    )
    facts = sharing(part, block_size)
    assert facts.prompt_tokens == sum(counts.values())
    assert facts.shared_tokens == sum(count > 1 for count in counts.values())
    assert facts.saveable_tokens == block_size * sum(count - 1 for count in blocks.values())
    assert facts.longest == max(len(r.prompt_ids) + r.output_len for r in requests)


def test_w1_can_save_all_prefixes_but_one_of_each_group():
    facts = sharing(W1, 32)
    assert facts.shared_tokens == 64 * 256
    assert facts.saveable_tokens == 64 * 15 * 256


def test_kv_is_a_share_of_the_prefixes_in_whole_blocks():
    facts = sharing(W1, 16)
    assert [kv_tokens_for(facts, f) for f in (0.25, 0.5, 1.5)] == [4096, 8192, 24576]
    assert kv_tokens_for(facts, 0.3) % LARGEST_BLOCK == 0


def test_kv_always_holds_two_of_the_longest_requests():
    facts = sharing(SMALL, 16)
    assert kv_tokens_for(facts, 0.01) >= 2 * facts.longest


def test_kv_of_a_workload_without_sharing_is_that_of_w1():
    for fraction in (0.25, 1.5):
        w1_tokens = kv_tokens_for(sharing(W1, 16), fraction)
        assert kv_tokens_for(sharing(ZERO, 16), fraction) == w1_tokens
