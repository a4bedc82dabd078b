"""Every name below a sink, and what it means; no other module spells one.

Names are relative to the sink and use "/". Nothing below `_raybatch/` ends in `.parquet`, because
a reader of the sink's parent would take it for data.
"""

import re
from functools import partial

from raybatch.errors import ConfigError

PLAN = "_raybatch/plan.json"
SCHEMA = "_raybatch/schema.arrow"
PLANS = "_raybatch/plan"
SUCCESS = "_SUCCESS"
DATA = "data"
DONE = "_raybatch/done"
STAGING = "_raybatch/staging"
ATTEMPTS = "_raybatch/attempts"
FRAGMENTS = "_raybatch/frag"
RUNS = "_raybatch/runs"
# an output of its own, from which one in the order of the input is made
PLAN_ORDER = "_plan_order"

_DIGITS = r"(\d{6}|[1-9]\d{6,})"


def check_name(name: str) -> str:
    """Return `name` if it is one of a file below the root of a store.

    Raises:
        ConfigError: it is absolute, holds NUL or a backslash, or has an empty, "." or ".." step.
    """
    if any(step in ("", ".", "..") for step in name.split("/")):
        raise ConfigError(
            f"the name {name!r} could leave the output folder; names are relative, without empty "
            "steps, '.' and '..'"
        )
    if "\0" in name or "\\" in name:
        raise ConfigError(f"the name {name!r} holds NUL or a backslash, which file systems cut")
    return name


def part_name(unit: int, partition: str = "") -> str:
    """Return the name of a part, in a partition such as "lang=en/year=2024" where there are any."""
    return f"{DATA}/{partition}{'/' if partition else ''}part-{unit:06d}.parquet"


def plan_name(number: int) -> str:
    return PLAN if number == 1 else f"_raybatch/plan-{number}.json"


def done_name(unit: int) -> str:
    """Return the name of the record that a unit of a partitioned output is complete."""
    return f"{DONE}/{unit:06d}.json"


def fragment_folder(unit: int) -> str:
    return f"{FRAGMENTS}/{unit:06d}"


def fragment_name(unit: int, first_pos: int, num_rows: int, attempt: str) -> str:
    return f"{fragment_folder(unit)}/{first_pos:06d}-{num_rows}-{attempt}.arrow"


def begun_name(unit: int, attempt: str) -> str:
    """Return the name of a fragment with the tokens so far of rows that are not finished."""
    return f"{fragment_folder(unit)}/begun-{attempt}.arrow"


def attempt_folder(unit: int) -> str:
    """Return the folder of the markers of rows of a unit that engines have died with."""
    return f"{ATTEMPTS}/{unit:06d}"


def attempt_name(unit: int, number: int) -> str:
    return f"{attempt_folder(unit)}/{number}.json"


def run_log_name(run_id: str, segment: int) -> str:
    return f"{RUNS}/{run_id}/{segment:06d}.jsonl"


def heartbeat_name(run_id: str) -> str:
    return f"{RUNS}/{run_id}.alive"


def staging_name(token: str) -> str:
    """Return the name of a file that is not published yet; local stores alone have them."""
    return f"{STAGING}/{token}"


def probe_name(token: str) -> str:
    """Return the name of a file that shows whether a store creates files exclusively."""
    return f"_raybatch/probe-{token}"


def _unit_in(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None


def _text_in(pattern: re.Pattern[str], name: str) -> str | None:
    match = pattern.fullmatch(name)
    return match[1] if match else None


# what a name stands for, None where it is of another kind; the unit of a part
part_unit = partial(
    _unit_in, re.compile(rf"data/(?:[^/]+=[^/]*/)*part-{_DIGITS}\.parquet", re.ASCII)
)
# of a record of what was committed
done_unit = partial(_unit_in, re.compile(rf"_raybatch/done/{_DIGITS}\.json", re.ASCII))
# of a fragment of either kind, and of one with tokens of rows that are not finished
fragment_unit = partial(_unit_in, re.compile(rf"_raybatch/frag/{_DIGITS}/[^/]+", re.ASCII))
begun_unit = partial(_unit_in, re.compile(rf"_raybatch/frag/{_DIGITS}/begun-[^/]+", re.ASCII))
# of a marker of deaths
attempt_unit = partial(_unit_in, re.compile(rf"_raybatch/attempts/{_DIGITS}/\d+\.json", re.ASCII))
# the hash of the plan of a shard
plan_of_shard = partial(_text_in, re.compile(r"_raybatch/plan/([^/]+)/[^/]+"))
# the run of a segment of a log, and of a heartbeat
run_log_run = partial(_text_in, re.compile(r"_raybatch/runs/([^/]+)/\d{6,}\.jsonl", re.ASCII))
heartbeat_run = partial(_text_in, re.compile(r"_raybatch/runs/([^/]+)\.alive"))
# the token of a file that a store made to see what it can do
probe_token = partial(_text_in, re.compile(r"_raybatch/probe-([^/]+)"))
