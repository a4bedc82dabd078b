from raybatch.actors.queue.waiting_queues import PrefixAffinity


def test_a_group_that_starts_at_a_second_replica_is_a_cut_with_its_prefix():
    affinity = PrefixAffinity()
    affinity.start(1, [(7, 64), (8, 32)])
    affinity.start(2, [(7, 64)])
    assert (1, 64) == (affinity.num_cuts, affinity.cut_tokens)


def test_a_group_that_ended_elsewhere_is_no_cut():
    affinity = PrefixAffinity()
    affinity.start(1, [(7, 64)])
    affinity.end(1, [7])
    affinity.start(2, [(7, 64)])
    assert 0 == affinity.num_cuts
