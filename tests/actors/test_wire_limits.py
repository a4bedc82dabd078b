"""What 32-bit offsets of Arrow lists can hold, told before it is exceeded."""

import numpy as np
import pyarrow as pa
import pytest

from raybatch.actors.wire.columns import token_lists, vector_lists
from raybatch.errors import ConfigError

MOST = 2**31 - 1


class Claimed:
    """Says that it holds so many numbers, and holds none."""

    def __init__(self, length, dtype):
        self._length = length
        self._dtype = dtype

    def __len__(self):
        return self._length

    def __array__(self, dtype=None, copy=None):
        return np.empty(0, self._dtype)


@pytest.mark.parametrize(
    ("make", "dtype", "told"),
    [(token_lists, np.int32, "tokens"), (vector_lists, np.float32, "numbers")],
    ids=["tokens", "vectors"],
)
def test_the_first_number_too_many_is_refused(make, dtype, told):
    # the last that is not refused is handed on to Arrow, which misses the numbers themselves
    with pytest.raises(pa.ArrowInvalid, match=str(MOST)):
        make([Claimed(MOST, dtype)])
    with pytest.raises(ConfigError, match=f"{MOST + 1} {told}"):
        make([Claimed(MOST, dtype), Claimed(1, dtype)])
