"""Group loads for tests."""

import numpy as np
from hypothesis import strategies as st

from raybatch.prefix.order import GroupLoad


def make_load(prefix, distinct, rows, outputs=None):
    """Build a load from plain lists."""
    return GroupLoad(
        prefix_tokens=np.array(prefix, np.int64),
        distinct_tokens=np.array(distinct, np.int64),
        num_rows=np.array(rows, np.int64),
        output_tokens=np.ones(len(rows)) if outputs is None else np.array(outputs, float),
    )


@st.composite
def loads(draw, max_groups=8, max_rows=6, max_tokens=50):
    """Draw a load with outputs."""
    num_groups = draw(st.integers(1, max_groups))
    rows = draw(st.lists(st.integers(1, max_rows), min_size=num_groups, max_size=num_groups))
    tokens = st.integers(0, max_tokens)
    lists = [draw(st.lists(tokens, min_size=num_groups, max_size=num_groups)) for _ in range(3)]
    prefix, distinct, outputs = lists
    return make_load(prefix, [d + r for d, r in zip(distinct, rows, strict=True)], rows, outputs)
