"""The first step of every run: which plan holds."""

from collections.abc import Callable

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import DATA, PLAN
from raybatch.durable.stores.protocols import Store
from raybatch.errors import CommitError


def open_plan(store: Store, make: Callable[[], bytes], *, name: str = PLAN) -> bytes:
    """Return the plan of an output, making it where there is none.

    What is returned was read from the store: of two runs at once both follow the one plan that
    was created first, and the shards of the other are never read.

    Args:
        make: writes the shards of a new plan, under names of its own, and returns `plan.json`.
        name: of the file; another than the first plan's for input that came later.

    Raises:
        CommitError: there are parts and no plan.
    """
    stored = _read(store, name)
    if stored is None:
        if name == PLAN:
            _refuse_parts_without_plan(store)
        made = make()
        reach("before_plan")
        store.create(name, made)
        reach("after_plan")
        stored = _read(store, name)
    if stored is None:
        raise CommitError(
            f"{store.uri}/{name} was there and is gone; somebody else removes files of this output"
        )
    return stored


def _read(store: Store, name: str = PLAN) -> bytes | None:
    try:
        return store.read(name)
    except FileNotFoundError:
        return None


def _refuse_parts_without_plan(store: Store) -> None:
    # parts are listed before the plan is read again: another run writes them in that order
    names = store.names(DATA)
    if names and _read(store) is None:
        raise CommitError(
            f"{store.uri} holds {len(names)} files, such as {names[0]}, and no {PLAN}; choose "
            "another folder, or remove them yourself"
        )
