"""Feed-forward blocks that are computed at their owners: logits, tokens, chains and bytes."""

import random

import pytest
import torch

from raybatch.kernels.moe import route
from tests.engine.tiny_models import build
from tests.engine.weights.steps import prompt_logits
from tests.extensions.sharing.groups import ShardedLayers, decoder_of
from tests.extensions.sharing.models import NUM_LAYERS, VARIANTS, check, load, ownership
from tests.extensions.sharing.ranks import NO_ROWS, TWO_ROWS, Pass, random_pass, ranks_in_threads
from tests.tiers import pairs


@pytest.mark.parametrize(
    ("variant", "size", "by", "quantization"),
    pairs(VARIANTS, [2, 4], ["layer", "shard"], [None, "int8"]),
)
def test_logits_are_those_of_the_model(variant, size, by, quantization, folder_of, store):
    whole, models = load(folder_of(variant), size, by, quantization=quantization)
    dice = random.Random(f"{variant} {size} {by}")
    passes = [[random_pass(dice) for _ in range(size)] for _ in range(8)]
    # of one rank alone, and of none
    passes += [[TWO_ROWS, *[NO_ROWS] * (size - 1)], [NO_ROWS] * size]

    def act(rank, number):
        return [rank.run(each[number]) for each in passes], rank.exchange.counters

    made = ranks_in_threads(store, models, act)
    alone = decoder_of(whole)
    for number, (found, counters) in enumerate(made):
        assert counters.num_exchanges == len(passes)
        assert counters.num_dummies == sum(not each[number].num_rows for each in passes)
        for each, logits in zip((of_ranks[number] for of_ranks in passes), found, strict=True):
            if each.num_rows:
                check(each.logits(alone, whole.spec), logits)
            else:
                assert logits is None


def greedy_tokens(logits_of, prompt, count):
    """Return the tokens behind a prompt, one more at each of its forward passes."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("variant", "by", "kind"), pairs(VARIANTS, ["layer", "shard"], ["shared", "inboxes", "gloo"])
)
def test_tokens_of_a_tail_are_those_of_the_model(variant, by, kind, folder_of, store):
    """Rows end one after the other, until all ranks but one are dummies; then that one leaves."""
    whole, models = load(folder_of(variant), 3, by)
    prompts, counts = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3]], [2, 9, 5]

    def logits(decoder, tokens):
        last = (len(tokens) - 1,)
        return prompt_logits(
            decoder, whole.spec, lens=(len(tokens),), logits_of=last, token_ids=tokens
        )

    def act(rank, number):
        is_last = False

        def in_exchange(tokens):
            assert not rank.exchange.begin(len(tokens), 1).is_last
            return logits(rank.decoder, tokens)

        found = greedy_tokens(in_exchange, prompts[number], counts[number])
        while not is_last:
            # the one with most tokens is the last to come here
            is_last = rank.exchange.begin(0, ends=number == 1).is_last
            rank.exchange.serve()
        return found, rank.exchange.counters.num_exchanges

    alone = decoder_of(whole)
    made = ranks_in_threads(store, models, act, kind=kind)
    for number, (found, num_exchanges) in enumerate(made):
        expected = greedy_tokens(
            lambda tokens: logits(alone, tokens), prompts[number], counts[number]
        )
        assert expected == found
        assert num_exchanges == max(counts) + 1


@pytest.mark.parametrize("by", ["layer", "shard"])
def test_bits_do_not_depend_on_which_rank_has_the_rows(by, folder_of, store):
    for variant in VARIANTS:
        whole, models = load(folder_of(variant), 4, by)
        by_shards = ShardedLayers(whole.weights, ownership(4, by))
        expected = TWO_ROWS.logits(decoder_of(whole, by_shards), whole.spec)

        def act(rank, number):
            return [rank.run(TWO_ROWS if turn == number else NO_ROWS) for turn in range(4)]

        made = ranks_in_threads(store, models, act)
        found = [logits[number] for number, logits in enumerate(made)]
        assert all(torch.equal(found[0], logits) for logits in found)
        if by == "shard":
            assert torch.equal(expected, found[0])


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_travel_with_any_number_of_experts(top_k, dtype, tmp_path, store):
    model = build("qwen3-moe", num_hidden_layers=NUM_LAYERS, num_experts_per_tok=top_k)
    model.save_pretrained(tmp_path)
    whole, models = load(tmp_path, 4, "shard", dtype=dtype)
    by_shards = decoder_of(whole, ShardedLayers(whole.weights, ownership(4, "shard")))
    passes = [Pass((num_rows,), (num_rows - 1,), seed) for num_rows in (1, 2) for seed in range(3)]

    def act(rank, number):
        return [rank.run(each if number == 1 else NO_ROWS) for each in passes]

    made = ranks_in_threads(store, models, act)
    for each, found in zip(passes, made[1], strict=True):
        assert torch.equal(each.logits(by_shards, whole.spec), found)


@pytest.mark.parametrize("by", ["layer", "shard"])
def test_an_owner_runs_one_chain_for_all_ranks(by, folder_of, store):
    _, models = load(folder_of("llama-biases-tied"), 4, by)
    num_exchanges = 3

    def act(rank, number):
        for _ in range(num_exchanges):
            rank.run(Pass((2,) * number, tuple(range(number)), 0))
        return rank.exchange.counters

    made = ranks_in_threads(store, models, act)
    units = [ownership(4, by).owned_by(number) for number in range(4)]
    for number, counters in enumerate(made):
        owned = [sum(unit.layer == layer for unit in units[number]) for layer in range(NUM_LAYERS)]
        assert counters.num_chains == tuple(num_exchanges * count for count in owned)
        # 0, 2, 4 and 6 rows, of which 0, 1, 2 and 3 are left in the last layer
        of_others = [12 - 2 * number] * (NUM_LAYERS - 1) + [6 - number]
        served = sum(num * rows for num, rows in zip(owned, of_others, strict=True))
        assert counters.num_served_rows == num_exchanges * served


@pytest.mark.parametrize("by", ["layer", "shard"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_sent_for_dummies_and_they_serve(variant, by, folder_of, store):
    whole, models = load(folder_of(variant), 4, by)

    def act(rank, number):
        return rank.run(TWO_ROWS if number == 1 else NO_ROWS), rank.exchange.counters

    made = ranks_in_threads(store, models, act)
    check(TWO_ROWS.logits(decoder_of(whole), whole.spec), made[1][0])
    for number, (_, counters) in enumerate(made):
        units = len(ownership(4, by).owned_by(number))
        assert sum(counters.num_chains) <= units
        if number != 1:
            # all that goes is of rank 1, and comes back to it
            assert [0, 2, 3] == [i for i in range(4) if not counters.sent_bytes[i]]
            assert counters.num_served_rows <= 2 * units
    if variant == "llama-biases-tied":
        of_rows = 4 * whole.spec.model_dim * 2
        for number in (0, 2, 3):
            units = len(ownership(4, by).owned_by(number))
            assert made[number][1].sent_bytes[1] == of_rows * units
            assert made[1][1].sent_bytes[number] == of_rows * units
            assert made[number][1].num_served_rows == 2 * units


def test_rows_are_exchanged_once_in_a_round(folder_of, store):
    _, models = load(folder_of("llama-biases-tied"), 2, "layer")
    seen = [SeenPeers(), SeenPeers()]

    def watched(peers, number):
        seen[number].peers = peers
        return seen[number]

    def act(rank, number):
        rank.run(TWO_ROWS)
        rank.run(TWO_ROWS if number else NO_ROWS)

    ranks_in_threads(store, models, act, wrap=watched)
    # rank 0 owns 3 layers and has rows in one round; what goes, and what comes, is one each
    assert seen[0].names == ["exchange", *["transfer"] * 10, "exchange", *["transfer"] * 6]
    assert seen[1].names == ["exchange", *["transfer"] * 10, "exchange", *["transfer"] * 6]


def test_a_round_without_rows_sends_nothing(folder_of, store):
    _, models = load(folder_of("qwen3-moe"), 4, "shard")

    def act(rank, number):
        rank.run(NO_ROWS)
        return rank.exchange.counters

    for counters in ranks_in_threads(store, models, act):
        assert (0, 0, 0) == (
            sum(counters.sent_bytes),
            sum(counters.num_chains),
            counters.num_served_rows,
        )
        assert (1, 1) == (counters.num_exchanges, counters.num_dummies)


def test_a_row_goes_to_the_owners_of_its_experts_alone(folder_of, store):
    whole, models = load(folder_of("qwen3-moe"), 4, "shard")
    each, seen = Pass((3, 4), tuple(range(7)), 5), []
    alone, spec = decoder_of(whole), whole.spec

    def watch(layer, x, hidden):
        ffn = alone.layers.ffn(layer)
        _, chosen = route(hidden, ffn.router, spec.moe.top_k, spec.moe.norm_topk_prob)
        seen.append((chosen % 4).tolist())
        alone.add_shard_(x, hidden, ffn, ffn.shard)

    alone.ffn_service = watch
    each.logits(alone, spec)

    def act(rank, number):
        rank.run(each if number == 2 else NO_ROWS)
        return rank.exchange.counters

    counters = ranks_in_threads(store, models, act)
    row_bytes, count_bytes = 4 * spec.model_dim + 8 * spec.moe.top_k, 8
    for rank in (0, 1, 3):
        shards = [(rank - layer) % 4 for layer in range(NUM_LAYERS)]
        rows = sum(
            sum(shard in row for row in chosen) for shard, chosen in zip(shards, seen, strict=True)
        )
        assert 0 < rows < each.num_rows * NUM_LAYERS
        assert counters[2].sent_bytes[rank] == rows * row_bytes + NUM_LAYERS * count_bytes
        assert counters[rank].sent_bytes[2] == rows * 4 * spec.model_dim


class SeenPeers:
    """Peers whose operations are seen, by name."""

    def __init__(self):
        self.names, self.peers = [], None

    def all_gather(self, numbers):
        self.names.append("exchange")
        return self.peers.all_gather(numbers)

    def transfer(self, sends, receives):
        self.names.append("transfer")
        self.peers.transfer(sends, receives)

    def close(self):
        self.peers.close()
