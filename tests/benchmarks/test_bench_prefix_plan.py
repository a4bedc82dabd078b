import pytest
from prefix_plan import measure


@pytest.mark.parametrize(("shares", "num_groups"), [(True, 200), (False, 0)])
def test_drawn_prompts_share_what_the_script_says(shares, num_groups):
    # one topic of 200 documents: 4 blocks for all, 16 each; prompts of 480 to 495 tokens
    found = measure(3200, shares=shares, seed=1, with_sort=False)
    saved = (64 * 3199 + 256 * 200 * 15) / (3200 * 487.5) if shares else 0
    assert found["num_groups"] == num_groups
    assert found["saved_multi_level"] == pytest.approx(saved, rel=0.002)
