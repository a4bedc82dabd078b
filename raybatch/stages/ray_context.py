"""How Ray Data runs what ends in units."""

from typing import Any

__all__ = ["settle_context"]


def settle_context(dataset: Any) -> None:  # noqa: ANN401 - Ray has no types
    """Let a dataset run as long as engines take, and let units alone say which rows are done."""
    context = dataset.context
    # A run of long outputs may finish no block for half an hour, and progress is shown elsewhere.
    context.execution_no_progress_timeout_s = -1
    # Ray's wrapper of an exception loses the cause on its way to the driver.
    context.raise_original_map_exception = True
    # Ray's own checkpoint would leave out rows that wait in the journal for the rest of their unit.
    context.checkpoint_config = None
