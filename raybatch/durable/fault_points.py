"""Fault points where a test kills the process, to show that the run can be resumed.

RAYBATCH_FAULT=after_publish:unit=3     dies when unit 3 reaches the point
RAYBATCH_FAULT=after_publish            dies when the first unit reaches it
"""

import os

from raybatch.config import armed_fault
from raybatch.errors import ConfigError, did_you_mean

EXIT_CODE = 70
REACHED = "RAYBATCH_FAULT reached"

POINTS = (
    *("before_shards", "before_plan", "after_plan", "after_list", "before_unit", "after_rows"),
    *("before_fragment", "after_fragment", "before_publish", "after_publish", "before_done"),
    *("before_join", "after_join", "after_join_record"),
    *("before_audit", "before_success", "after_success"),
    *("before_table", "in_table", "after_table"),
)


def reach(point: str, *, unit: int | None = None) -> None:
    """Exit the process here, at once and without cleanup, if RAYBATCH_FAULT names this point.

    Raises:
        ConfigError: RAYBATCH_FAULT names an unknown point, or its unit is malformed.
    """
    armed = armed_fault()
    if armed is None:
        return
    name, _, where = armed.partition(":")
    if name not in POINTS:
        raise ConfigError(
            f"RAYBATCH_FAULT={armed!r}: unknown point{did_you_mean(name, POINTS)}; points are "
            f"{', '.join(POINTS)}"
        )
    key, _, number = where.partition("=")
    if where and (key != "unit" or not number.isdecimal()):
        raise ConfigError(f"RAYBATCH_FAULT={armed!r} must look like {name}:unit=3")
    if name == point and (not where or int(number) == unit):
        # Ray does not report the exit code of a process that it restarts, only its output
        os.write(2, f"{REACHED} {point}\n".encode())
        os._exit(EXIT_CODE)
