"""Feed-forward blocks that are computed at their owners: logits, chains, bytes, and ends."""

import random
import threading
from dataclasses import replace

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.weights.tiles import tiled
from raybatch.errors import TeamError
from raybatch.kernels.moe import route
from raybatch.policy.ownership import Ownership
from tests.engine.share.ranks import (
    NO_ROWS,
    TWO_ROWS,
    CountedPeers,
    Pass,
    ThreadStore,
    decoder_of,
    random_pass,
    ranks_in_threads,
)
from tests.engine.tiny_models import build
from tests.engine.weights.groups import load_group

NUM_LAYERS = 5
# with biases, with experts in all layers, and in some
VARIANTS = ("llama-biases-tied", "qwen3-moe", "qwen3-moe-sparse-step")


@pytest.fixture(scope="module")
def store():
    return ThreadStore()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def get(variant, num_layers=NUM_LAYERS):
        if (variant, num_layers) not in made:
            folder = tmp_path_factory.mktemp(variant)
            build(variant, num_hidden_layers=num_layers).save_pretrained(folder)
            made[variant, num_layers] = folder
        return made[variant, num_layers]

    return get


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def ownership(size, by, num_layers=NUM_LAYERS):
    return Ownership(size=size, num_layers=num_layers, by=by)


def load(path, size, by, *, quantization=None, num_layers=NUM_LAYERS):
    config = EngineConfig(device="cpu", dtype="float32", quantization=quantization)
    whole = load_model(str(path), config)
    return whole, load_group(path, ownership(size, by, num_layers), configs=[config] * size)


def check(expected, found):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("by", ["layer", "tile"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_model(variant, size, by, quantization, folder_of, store):
    whole, models = load(folder_of(variant), size, by, quantization=quantization)
    dice = random.Random(f"{variant} {size} {by}")
    passes = [[random_pass(dice) for _ in range(size)] for _ in range(8)]
    # of one rank alone, and of none
    passes += [[TWO_ROWS, *[NO_ROWS] * (size - 1)], [NO_ROWS] * size]

    def act(rank, number):
        return [rank.run(each[number]) for each in passes], rank.rounds.counters

    made = ranks_in_threads(store, models, act)
    alone = decoder_of(whole)
    for number, (found, counters) in enumerate(made):
        assert counters.num_rounds == len(passes)
        assert counters.num_dummies == sum(not each[number].num_rows for each in passes)
        for each, logits in zip((of_ranks[number] for of_ranks in passes), found, strict=True):
            if each.num_rows:
                check(each.logits(alone, whole.spec), logits)
            else:
                assert logits is None


@pytest.mark.parametrize("by", ["layer", "tile"])
def test_bits_do_not_depend_on_which_rank_has_the_rows(by, folder_of, store):
    for variant in VARIANTS:
        whole, models = load(folder_of(variant), 4, by)
        by_tiles = replace(whole, weights=tiled(whole.weights, ownership(4, by)))
        expected = TWO_ROWS.logits(decoder_of(by_tiles), whole.spec)

        def act(rank, number):
            return [rank.run(TWO_ROWS if turn == number else NO_ROWS) for turn in range(4)]

        made = ranks_in_threads(store, models, act)
        found = [logits[number] for number, logits in enumerate(made)]
        assert all(torch.equal(found[0], logits) for logits in found)
        if by == "tile":
            assert torch.equal(expected, found[0])


@pytest.mark.parametrize("by", ["layer", "tile"])
def test_an_owner_runs_one_chain_for_all_ranks(by, folder_of, store):
    _, models = load(folder_of("llama-biases-tied"), 4, by)
    num_rounds = 3

    def act(rank, number):
        for _ in range(num_rounds):
            rank.run(Pass((2,) * number, tuple(range(number)), 0))
        return rank.rounds.counters

    made = ranks_in_threads(store, models, act)
    units = [ownership(4, by).owned_by(number) for number in range(4)]
    for number, counters in enumerate(made):
        owned = [sum(unit.layer == layer for unit in units[number]) for layer in range(NUM_LAYERS)]
        assert counters.num_chains == tuple(num_rounds * count for count in owned)
        # 0, 2, 4 and 6 rows, of which 0, 1, 2 and 3 are left in the last layer
        of_others = [12 - 2 * number] * (NUM_LAYERS - 1) + [6 - number]
        served = sum(num * rows for num, rows in zip(owned, of_others, strict=True))
        assert counters.num_served_rows == num_rounds * served


@pytest.mark.parametrize("by", ["layer", "tile"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_sent_for_dummies_and_they_serve(variant, by, folder_of, store):
    whole, models = load(folder_of(variant), 4, by)

    def act(rank, number):
        return rank.run(TWO_ROWS if number == 1 else NO_ROWS), rank.rounds.counters

    made = ranks_in_threads(store, models, act)
    check(TWO_ROWS.logits(decoder_of(whole), whole.spec), made[1][0])
    for number, (_, counters) in enumerate(made):
        units = len(ownership(4, by).owned_by(number))
        assert sum(counters.num_chains) <= units
        if number != 1:
            # all that goes is of rank 1, and comes back to it
            assert [0, 2, 3] == [i for i in range(4) if not counters.sent_bytes[i]]
            assert [0, 2, 3] == [i for i in range(4) if not counters.received_bytes[i]]
            assert counters.num_served_rows <= 2 * units
    if variant == "llama-biases-tied":
        of_rows = 4 * whole.spec.model_dim * 2
        for number in (0, 2, 3):
            units = len(ownership(4, by).owned_by(number))
            assert made[number][1].sent_bytes[1] == of_rows * units
            assert made[number][1].received_bytes[1] == of_rows * units
            assert made[number][1].num_served_rows == 2 * units


def test_a_round_without_rows_sends_nothing(folder_of, store):
    _, models = load(folder_of("qwen3-moe"), 4, "tile")

    def act(rank, number):
        rank.run(NO_ROWS)
        return rank.rounds.counters

    for counters in ranks_in_threads(store, models, act):
        assert (0, 0, 0) == (
            sum(counters.sent_bytes),
            sum(counters.num_chains),
            counters.num_served_rows,
        )
        assert (1, 1) == (counters.num_rounds, counters.num_dummies)


def test_a_dummy_that_owns_nothing_returns_at_once(folder_of, store):
    whole, models = load(folder_of("llama-biases-tied", 2), 4, "layer", num_layers=2)
    has_returned = threading.Event()

    def act(rank, number):
        if number == 3:
            rank.run(NO_ROWS)
            has_returned.set()
            return None
        rank.rounds.begin(2 if number == 0 else 0)
        # before any of the others does anything
        assert has_returned.wait(10)
        if number:
            rank.rounds.serve()
            return None
        return TWO_ROWS.logits(rank.decoder, rank.spec)

    made = ranks_in_threads(store, models, act)
    check(TWO_ROWS.logits(decoder_of(whole), whole.spec), made[0])


def test_a_row_goes_to_the_owners_of_its_experts_alone(folder_of, store):
    whole, models = load(folder_of("qwen3-moe"), 4, "tile")
    each, seen = Pass((3, 4), tuple(range(7)), 5), []
    alone, spec = decoder_of(whole), whole.spec

    def watch(layer, x, hidden):
        ffn = alone.layers.ffn(layer)
        _, chosen = route(hidden, ffn.router, spec.moe.top_k, spec.moe.norm_topk_prob)
        seen.append((chosen % 4).tolist())
        alone.add_tile_(x, hidden, ffn, ffn.tile)

    alone.ffn_service = watch
    each.logits(alone, spec)

    def act(rank, number):
        rank.run(each if number == 2 else NO_ROWS)
        return rank.rounds.counters

    counters = ranks_in_threads(store, models, act)[2]
    row_bytes, count_bytes = 4 * spec.model_dim + 8 * spec.moe.top_k, 8
    for rank in (0, 1, 3):
        tiles = [(rank - layer) % 4 for layer in range(NUM_LAYERS)]
        rows = sum(
            sum(tile in row for row in chosen) for tile, chosen in zip(tiles, seen, strict=True)
        )
        assert 0 < rows < each.num_rows * NUM_LAYERS
        assert counters.sent_bytes[rank] == rows * row_bytes + NUM_LAYERS * count_bytes
        assert counters.received_bytes[rank] == rows * 4 * spec.model_dim


def test_all_leave_behind_the_round_in_which_one_asked_for_it(folder_of, store):
    whole, models = load(folder_of("llama-biases-tied"), 3, "layer")

    def act(rank, number):
        num_rounds, is_last = 0, False
        while not is_last:
            ends = number == 1 and num_rounds == 4
            is_last = rank.rounds.begin(2, ends=ends).is_last
            logits = TWO_ROWS.logits(rank.decoder, rank.spec)
            num_rounds += 1
        return num_rounds, logits

    expected = TWO_ROWS.logits(decoder_of(whole), whole.spec)
    for num_rounds, logits in ranks_in_threads(store, models, act):
        assert num_rounds == 5
        check(expected, logits)


@pytest.mark.parametrize("by_gloo", [False, True], ids=["shared", "gloo"])
def test_an_idle_rank_hears_that_a_round_has_begun(by_gloo, folder_of, store):
    _, models = load(folder_of("llama-biases-tied"), 2, "layer")
    may_begin, has_looked = threading.Event(), []

    def act(rank, number):
        if number == 0:
            assert may_begin.wait(10)
            rank.run(TWO_ROWS)
            return
        has_looked.append(rank.rounds.is_wanted())
        may_begin.set()
        while not rank.rounds.is_wanted():
            pass
        rank.run(NO_ROWS)
        has_looked.append(rank.rounds.is_wanted())

    assert [None, None] == ranks_in_threads(store, models, act, by_gloo=by_gloo)
    assert [False, False] == has_looked


@pytest.mark.parametrize("by", ["layer", "tile"])
def test_a_rank_that_is_late_only_delays_the_others(by, folder_of, store):
    whole, models = load(folder_of("qwen3-moe-sparse-step"), 3, by)
    dice = random.Random(by)
    passes = [[random_pass(dice) for _ in range(3)] for _ in range(3)]

    def late(peers, number):
        return LatePeers(peers, 0) if number == 1 else peers

    def act(rank, number):
        return [rank.run(each[number]) for each in passes]

    alone = decoder_of(whole)
    for number, found in enumerate(ranks_in_threads(store, models, act, wrap=late)):
        for each, logits in zip((of_ranks[number] for of_ranks in passes), found, strict=True):
            if each.num_rows:
                check(each.logits(alone, whole.spec), logits)


class LatePeers(CountedPeers):
    def before(self):
        threading.Event().wait(0.02)


class FailingPeers(CountedPeers):
    def fail(self):
        raise TeamError("this rank fails")


@pytest.mark.parametrize("by_gloo", [False, True], ids=["shared", "gloo"])
@pytest.mark.parametrize("by", ["layer", "tile"])
def test_wherever_a_rank_fails_the_others_hear_of_it(by, by_gloo, folder_of, store):
    """In an exchange, in what it sends, and in what it computes for others."""
    num_layers = 3
    path = folder_of("qwen3-moe-sparse-step", num_layers)
    _, models = load(path, 3, by, num_layers=num_layers)
    # gloo may miss that a connection has ended, until its timeout
    options = {"by_gloo": True, "timeout_s": 5.0} if by_gloo else {}
    at = 0
    while True:
        at += 1

        def failing(peers, number, at=at):
            return FailingPeers(peers, at) if number == 1 else peers

        def act(rank, number):
            for turn in range(2):
                rank.run(NO_ROWS if turn == number == 1 else TWO_ROWS)

        made = ranks_in_threads(store, models, act, wrap=failing, **options)
        if made[1] is None:
            break
        assert [TeamError] * 3 == [type(one) for one in made]
        assert str(made[1]) == "this rank fails"
        # nobody waited for the timeout
        assert not any("within" in str(one) for one in made)
    # every operation of two rounds, the exchanges among them
    assert at > 2 * num_layers
    assert [None] * 3 == made


def test_a_rank_that_hangs_is_not_waited_for_longer_than_the_timeout(folder_of, store):
    _, models = load(folder_of("llama-biases-tied"), 2, "layer")
    has_failed = threading.Event()

    def act(rank, number):
        if number == 1:
            rank.rounds.begin(2)
            assert has_failed.wait(10)
            return
        try:
            rank.run(TWO_ROWS)
        finally:
            has_failed.set()

    made = ranks_in_threads(store, models, act, timeout_s=0.4)
    assert "rank 1 did not answer within 0.4 s" == str(made[0])


def test_a_rank_leaves_with_its_error(folder_of, store):
    """The others need not wait until it is closed."""
    _, models = load(folder_of("llama-biases-tied"), 2, "layer")
    has_heard = threading.Event()

    def failing(peers, number):
        return FailingPeers(peers, 3) if number == 1 else peers

    def act(rank, number):
        try:
            rank.run(TWO_ROWS)
        except TeamError:
            if number == 1:
                assert has_heard.wait(10)
            has_heard.set()
            raise

    made = ranks_in_threads(store, models, act, wrap=failing)
    assert ["rank 1 has left the team", "this rank fails"] == [str(one) for one in made]


def test_a_rank_that_has_left_does_nothing_more(folder_of, store):
    _, models = load(folder_of("llama-biases-tied"), 2, "layer")

    def act(rank, number):
        rank.rounds.close()
        assert not rank.rounds.is_wanted()
        rank.rounds.begin(2)

    made = ranks_in_threads(store, models, act)
    assert ["this rank has left its group"] * 2 == [str(one) for one in made]
