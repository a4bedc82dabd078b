"""Files of runs that are not data: staged files, journals, probes, plans that do not hold.

Nothing here is ever counted as data, and nothing named here is a part, the plan that holds, or
`_SUCCESS`.
"""

from collections.abc import Callable, Collection, Iterator

from raybatch.durable.layout import (
    ATTEMPTS,
    FRAGMENTS,
    PLANS,
    STAGING,
    attempt_unit,
    fragment_unit,
    is_probe,
    plan_of_shard,
)
from raybatch.durable.stores.protocols import Store

# what is of no use to a complete output
_DROPPED = (FRAGMENTS, ATTEMPTS, STAGING)


def drop_journal_and_staging(store: Store) -> int:
    """Remove what nobody needs once the output is complete; return how many files.

    Other runs may still be at work: one that finds its staged file gone stages it again, and one
    that finds no journal finds the parts.
    """
    names = [name for folder in _DROPPED for name in store.names(folder)]
    for name in names:
        store.remove(name)
    return len(names)


def leftovers(
    store: Store, *, plans: Collection[str], is_committed: Callable[[int], bool], is_finished: bool
) -> Iterator[tuple[str, bool]]:
    """Yield the files that could go, each with whether a run at work could still miss it.

    Args:
        plans: hashes of the plans that hold; with none, no folder of a plan is named.
    """
    for folder, unit_of in ((FRAGMENTS, fragment_unit), (ATTEMPTS, attempt_unit)):
        for name in store.names(folder):
            unit = unit_of(name)
            if is_finished or (unit is not None and is_committed(unit)):
                yield name, False
    for name in store.names(STAGING):
        yield name, not is_finished
    for name in store.names("_raybatch"):
        if is_probe(name):
            yield name, not is_finished
    for name in store.names(PLANS) if plans else []:
        plan = plan_of_shard(name)
        if plan is not None and plan not in plans:
            yield name, True
