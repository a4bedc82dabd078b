"""Which rows of a unit engines have died with, kept for later runs.

Each marker has all that its writer knew, so the rows of many markers are joined by the largest
count. What cannot be read of a marker is left out: then a bad row costs a few deaths more.
"""

import json
import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from raybatch.durable.layout import attempt_folder, attempt_name, attempt_unit
from raybatch.durable.stores.protocols import Store
from raybatch.durable.units import Unit
from raybatch.errors import CommitError, error_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strikes:
    """Rows of a unit, by position, that engines have died with.

    Args:
        given_up: rows that ran alone when the last engine died; they are error rows.
    """

    crashes: Mapping[int, int] = field(default_factory=dict)
    given_up: Set[int] = frozenset()

    def __or__(self, other: "Strikes") -> "Strikes":
        """Return the union; both may have seen the same deaths."""
        crashes = dict(self.crashes)
        for pos, number in other.crashes.items():
            crashes[pos] = max(number, crashes.get(pos, 0))
        return Strikes(crashes=crashes, given_up=frozenset(self.given_up | other.given_up))


def write_strikes(store: Store, unit: Unit, strikes: Strikes, *, plan_hash: str) -> None:
    """Write a marker under the next number that nobody has.

    Raises:
        CommitError: a row has no place in the unit, or there are none.
    """
    places = sorted(strikes.crashes)
    if not places or places[0] < 0 or places[-1] >= unit.num_rows:
        raise CommitError(f"unit {unit.number} has {unit.num_rows} rows; no strikes at {places}")
    record = {
        "plan": plan_hash,
        "unit": unit.number,
        "crashes": {str(pos): strikes.crashes[pos] for pos in places},
        "given_up": sorted(strikes.given_up),
    }
    data = json.dumps(record, sort_keys=True).encode()
    number = len(_names(store, unit))
    while not store.create(attempt_name(unit.number, number), data):
        number += 1


def read_strikes(store: Store, unit: Unit, *, plan_hash: str) -> Strikes:
    """Return the strikes of all markers of a unit; one listing where there are none."""
    known = Strikes()
    for name in _names(store, unit):
        try:
            known |= _decoded(store.read(name), unit, plan_hash)
        except FileNotFoundError:  # dropped after another run was complete
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s/%s is left out: %s", store.uri, name, error_text(error))
    return known


def _names(store: Store, unit: Unit) -> list[str]:
    names = store.names(attempt_folder(unit.number))
    return [name for name in names if attempt_unit(name) == unit.number]


def _decoded(data: bytes, unit: Unit, plan_hash: str) -> Strikes:
    record = json.loads(data)
    if (record["plan"], record["unit"]) != (plan_hash, unit.number):
        raise ValueError(f"it belongs to unit {record['unit']!r} of plan {record['plan']!r}")
    crashes = {int(pos): int(number) for pos, number in record["crashes"].items()}
    given_up = frozenset(int(pos) for pos in record["given_up"])
    if any(not 0 <= pos < unit.num_rows for pos in crashes) or not given_up <= crashes.keys():
        raise ValueError("a row has no place in the unit")
    return Strikes(crashes=crashes, given_up=given_up)
