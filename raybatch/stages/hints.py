"""What a feeder tells its user once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

# A feeder that never held more rows than this after so many calls starves an engine.
_FEW_ROWS = 256
_CALLS_BEFORE_HINT = 4


class FewRowsHint:
    """Logs one line where Ray hands a feeder so few rows at once that engines wait for more.

    Args:
        calls_per_feeder: calls in flight where the dataset is mapped as it should be.
    """

    def __init__(self, calls_per_feeder: int) -> None:
        self._calls_per_feeder = calls_per_feeder
        self._num_calls = 0
        self._num_rows = 0
        self._most_rows = 0

    @contextmanager
    def holding(self, num_rows: int) -> Iterator[None]:
        """Count the rows that a call holds until it ends."""
        self._num_rows += num_rows
        self._most_rows = max(self._most_rows, self._num_rows)
        try:
            yield
        finally:
            self._num_rows -= num_rows
            self._num_calls += 1
            if self._num_calls == _CALLS_BEFORE_HINT and self._most_rows < _FEW_ROWS:
                logger.warning(
                    "Ray hands over at most %d rows at once, too few to fill the engines; "
                    "stage.apply(ds) in place of ds.map_batches(stage) keeps %d row batches in "
                    "flight",
                    self._most_rows,
                    self._calls_per_feeder,
                )
