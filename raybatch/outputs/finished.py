"""Reads what finished outputs have in common: their plans and units."""

from raybatch.durable.audit import is_finished
from raybatch.durable.layout import PLAN
from raybatch.durable.sink import is_marked
from raybatch.durable.storage import error_context, store_of
from raybatch.durable.units import UnitPlan
from raybatch.errors import ConfigError
from raybatch.planning.store import read_all_units, read_plans
from raybatch.planning.stored import StoredPlan


def read_finished(sink: str, then: str = "") -> tuple[tuple[StoredPlan, ...], UnitPlan]:
    """Return the plans of an output and their units, joined.

    Raises:
        ConfigError: it is not the output of a job, or not finished; the message ends with `then`.
    """
    store = store_of(sink)
    with error_context(f"output {sink!r} cannot be read"):
        if store.size(PLAN) is None and not is_marked(store):
            raise ConfigError(f"{sink} is not the output of a raybatch job")
        plans = read_plans(sink)
        units = read_all_units(sink, plans) if plans else None
        if units is None or not is_finished(store, units):
            raise ConfigError(
                f"the output in {sink} is not finished; run the job again to the end{then}"
            )
    return plans, units
