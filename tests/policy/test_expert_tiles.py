import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.policy.expert_tiles import experts_of, sent_rows
from raybatch.policy.ownership import Ownership, Unit


@pytest.mark.parametrize(("size", "num_experts"), [(2, 8), (3, 8), (8, 8), (4, 128)])
def test_every_expert_is_in_one_tile_and_owned_by_layer_and_number(size, num_experts):
    ownership = Ownership(size=size, num_layers=5, by="tile")
    tiles = [list(experts_of(tile, size, num_experts)) for tile in range(size)]
    assert sorted(expert for some in tiles for expert in some) == list(range(num_experts))
    for layer in range(5):
        for tile, experts in enumerate(tiles):
            owners = {(layer + expert) % size for expert in experts}
            assert owners == {ownership.owner(Unit(layer, tile))}


def test_rows_go_to_the_owners_of_their_experts_once():
    rng = np.random.default_rng(0)
    for size, num_experts, top_k in ((2, 8, 2), (4, 16, 8), (8, 128, 8)):
        ownership = Ownership(size=size, num_layers=6, by="tile")
        chosen = np.array([rng.permutation(num_experts)[:top_k] for _ in range(30)])
        for layer in range(6):
            for rank in range(size):
                found = sent_rows(ownership, layer, rank, chosen)
                owners = [{(layer + e) % size for e in row} for row in chosen.tolist()]
                expected = [sum(to in some for some in owners) for to in range(size)]
                expected[rank] = 0
                assert list(found.by_owner) == expected
                assert sum(found.products) == chosen.size


def test_a_rank_without_rows_sends_none():
    found = sent_rows(Ownership(size=2, num_layers=1, by="tile"), 0, 0, np.empty((0, 2), np.int64))
    assert (found.by_owner, found.products) == ((0, 0), (0, 0))


def test_experts_are_not_shared_by_layer_or_by_more_ranks_than_there_are():
    with pytest.raises(ConfigError, match="by tile"):
        sent_rows(Ownership(size=2, num_layers=1), 0, 0, np.zeros((1, 1), np.int64))
    with pytest.raises(ConfigError, match="4 experts of a layer cannot be shared by 8 ranks"):
        experts_of(0, 8, 4)
