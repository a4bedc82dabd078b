"""The size limit of Arrow lists with 32-bit offsets is checked before it is exceeded."""

import numpy as np
import pyarrow as pa
import pytest

from raybatch.actors.wire.columns import token_lists, vector_lists
from raybatch.errors import ConfigError

MOST = 2**31 - 1


class Claimed:
    """Reports `length` numbers, and holds none."""

    def __init__(self, length, dtype):
        self._length = length
        self._dtype = dtype

    def __len__(self):
        return self._length

    def __array__(self, dtype=None, copy=None):
        return np.empty(0, self._dtype)


@pytest.mark.parametrize(
    ("make", "dtype", "kind"),
    [(token_lists, np.int32, "tokens"), (vector_lists, np.float32, "numbers")],
    ids=["tokens", "vectors"],
)
def test_the_first_number_too_many_is_refused(make, dtype, kind):
    # the largest allowed size reaches Arrow, which fails as there are no numbers
    with pytest.raises(pa.ArrowInvalid, match=str(MOST)):
        make([Claimed(MOST, dtype)])
    with pytest.raises(ConfigError, match=f"{MOST + 1} {kind}"):
        make([Claimed(MOST, dtype), Claimed(1, dtype)])
