"""Every name below a sink, and what it means; no other module spells one.

Names are relative to the sink and use "/". Nothing below `_raybatch/` ends in `.parquet`, because
a reader of the sink's parent would take it for data.
"""

import re

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
_PART = re.compile(rf"data/(?:[^/]+=[^/]*/)*part-{_DIGITS}\.parquet", re.ASCII)
_LOG = re.compile(r"_raybatch/runs/([^/]+)/\d{6,}\.jsonl", re.ASCII)
_ALIVE = re.compile(r"_raybatch/runs/([^/]+)\.alive")
_FRAGMENT = re.compile(rf"_raybatch/frag/{_DIGITS}/[^/]+", re.ASCII)
_ATTEMPT = re.compile(rf"_raybatch/attempts/{_DIGITS}/\d+\.json", re.ASCII)
_BEGUN = re.compile(rf"_raybatch/frag/{_DIGITS}/begun-[^/]+", re.ASCII)
_SHARD = re.compile(r"_raybatch/plan/([^/]+)/[^/]+")
_PROBE = re.compile(r"_raybatch/probe-[^/]+")
_DONE = re.compile(rf"_raybatch/done/{_DIGITS}\.json", re.ASCII)


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
    """Return the name of a unit's part.

    Args:
        partition: steps such as "lang=en/year=2024" where the output is partitioned.
    """
    return f"{DATA}/{partition}{'/' if partition else ''}part-{unit:06d}.parquet"


def part_unit(name: str) -> int | None:
    """Return the unit that a file below `data/` belongs to; None where the name is no part's."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None


def plan_name(number: int) -> str:
    """Return the name of a plan of an output: 1 is the first, others are of later input."""
    return PLAN if number == 1 else f"_raybatch/plan-{number}.json"


def done_name(unit: int) -> str:
    """Return the name of the record that a unit of a partitioned output is complete."""
    return f"{DONE}/{unit:06d}.json"


def done_unit(name: str) -> int | None:
    """Return the unit that a file below `_raybatch/done/` stands for; None where it is another."""
    match = _DONE.fullmatch(name)
    return int(match[1]) if match else None


def fragment_folder(unit: int) -> str:
    return f"{FRAGMENTS}/{unit:06d}"


def fragment_name(unit: int, first_pos: int, num_rows: int, attempt: str) -> str:
    return f"{fragment_folder(unit)}/{first_pos:06d}-{num_rows}-{attempt}.arrow"


def fragment_unit(name: str) -> int | None:
    """Return the unit whose journal a file is in; None where it is in none."""
    match = _FRAGMENT.fullmatch(name)
    return int(match[1]) if match else None


def begun_name(unit: int, attempt: str) -> str:
    """Return the name of a fragment with the tokens so far of rows that are not finished."""
    return f"{fragment_folder(unit)}/begun-{attempt}.arrow"


def is_begun(name: str) -> bool:
    """Return whether a fragment holds tokens of rows that are not finished."""
    return _BEGUN.fullmatch(name) is not None


def plan_of_shard(name: str) -> str | None:
    """Return the hash of the plan that a file is a shard of; None where it is of none."""
    match = _SHARD.fullmatch(name)
    return match[1] if match else None


def attempt_folder(unit: int) -> str:
    """Return the folder of the markers of rows of a unit that engines have died with."""
    return f"{ATTEMPTS}/{unit:06d}"


def attempt_name(unit: int, number: int) -> str:
    return f"{attempt_folder(unit)}/{number}.json"


def attempt_unit(name: str) -> int | None:
    """Return the unit whose rows a marker is about; None where the name is no marker's."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def run_log_name(run_id: str, segment: int) -> str:
    return f"{RUNS}/{run_id}/{segment:06d}.jsonl"


def run_log_run(name: str) -> str | None:
    """Return the run that a segment belongs to; None where the name is no segment's."""
    match = _LOG.fullmatch(name)
    return match[1] if match else None


def heartbeat_name(run_id: str) -> str:
    """Return the name of the heartbeat file of a run."""
    return f"{RUNS}/{run_id}.alive"


def heartbeat_run(name: str) -> str | None:
    """Return the run whose heartbeat a file is; None where the name is no heartbeat's."""
    match = _ALIVE.fullmatch(name)
    return match[1] if match else None


def staging_name(token: str) -> str:
    """Return the name of a file that is not published yet; local stores alone have them."""
    return f"{STAGING}/{token}"


def probe_name(token: str) -> str:
    """Return the name of a file that shows whether a store creates files exclusively."""
    return f"_raybatch/probe-{token}"


def is_probe(name: str) -> bool:
    """Return whether a file was made by a store to see what it can do."""
    return _PROBE.fullmatch(name) is not None
