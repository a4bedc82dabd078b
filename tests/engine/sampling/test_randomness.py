import numpy as np

from raybatch.engine.sampling.draw import sequence_key, uniforms


def test_seed_sample_and_position_each_change_the_number():
    base = uniforms(np.array([sequence_key(7, 0)], np.uint64), np.array([3]))[0]
    changed = [
        uniforms(np.array([sequence_key(8, 0)], np.uint64), np.array([3]))[0],
        uniforms(np.array([sequence_key(7, 1)], np.uint64), np.array([3]))[0],
        uniforms(np.array([sequence_key(7, 0)], np.uint64), np.array([4]))[0],
    ]
    assert len({base, *changed}) == 4


def test_neighbouring_seeds_samples_and_positions_share_no_number():
    keys = [sequence_key(seed, sample) for seed in range(40) for sample in range(10)]
    drawn = uniforms(np.repeat(np.array(keys, np.uint64), 50), np.tile(np.arange(50), len(keys)))
    assert len(np.unique(drawn)) == len(drawn)
    assert 0.49 < drawn.mean() < 0.51
