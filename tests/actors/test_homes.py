from raybatch.actors.queue.affinity import Homes


def test_a_group_that_starts_at_a_second_replica_is_a_cut_with_its_prefix():
    homes = Homes()
    homes.start(1, [(7, 64), (8, 32)])
    homes.start(2, [(7, 64)])
    assert (1, 64) == (homes.num_cuts, homes.cut_tokens)


def test_a_group_that_ended_elsewhere_is_no_cut():
    homes = Homes()
    homes.start(1, [(7, 64)])
    homes.end(1, [7])
    homes.start(2, [(7, 64)])
    assert 0 == homes.num_cuts
