"""Names of all files below a sink; no other module spells them.

Names are relative to the sink and use "/". Nothing below `_raybatch/` ends in `.parquet`, because
a reader of the sink's parent would read it as data.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

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
# of a folder that `raybatch ordered` or `raybatch compact` writes: what it copies
COPY = "_raybatch/copy.json"
# results of scans of the input files
SCAN = "_raybatch/scan.json"
# of a finished output: the tables to which its rows were added
PUBLISHED = "_raybatch/published"
# folder of the output in plan order from which one in input order is made
PLAN_ORDER = "_plan_order"
# folder of the output with a part per unit, from which larger parts are joined
UNITS = "_units"
# folders of outputs from which the output of the sink is made
BELOW = (PLAN_ORDER, UNITS)
# records of units whose parts were joined into parts of another output
JOINED = "_raybatch/joined"
# rows of a source that is no folder of files, and which of the folders below it are complete
SOURCE = "_source"
SOURCE_RECORD = "_source/source.json"

_T = TypeVar("_T")

_DIGITS = r"(\d{6}|[1-9]\d{6,})"


def check_name(name: str) -> str:
    """Return `name` if it names a file below the root of a store.

    Raises:
        ConfigError: it is absolute, has NUL or a backslash, or has an empty, "." or ".." part.
    """
    if any(step in ("", ".", "..") for step in name.split("/")):
        raise ConfigError(
            f"the name {name!r} could point outside of the output folder; names must be relative, "
            "without empty parts, '.' and '..'"
        )
    if "\0" in name or "\\" in name:
        raise ConfigError(f"the name {name!r} has a NUL or a backslash, which is not allowed")
    return name


def part_name(unit: int, partition: str = "") -> str:
    """Return the name of a part, in a partition such as "lang=en/year=2024" if partitioned."""
    return f"{DATA}/{partition}{'/' if partition else ''}part-{unit:06d}.parquet"


def part_folder(name: str) -> str:
    """Return the partition in the name of a part; "" for none."""
    return name.removeprefix(f"{DATA}/").rpartition("/")[0]


def plan_name(number: int) -> str:
    return PLAN if number == 1 else f"_raybatch/plan-{number}.json"


def ordered_name(plan: str, units: range) -> str:
    """Return the name of a file with the rows of some adjacent units, in the order of the plan."""
    return f"{PLANS}/{plan}/ordered-{units.start:06d}-{units.stop:06d}.arrow"


# each returns a name from the values for its fields: the folder of a token, and a file in it
source_folder = f"{SOURCE}/{{}}".format
source_name = f"{SOURCE}/{{}}/{{:06d}}.parquet".format
# of a unit of a partitioned output: the record that it is complete
done_name = f"{DONE}/{{:06d}}.json".format
# of the first unit and that after the last one: the record that their parts were joined
joined_name = f"{JOINED}/{{:06d}}-{{:06d}}.json".format
# of a token
published_name = f"{PUBLISHED}/{{}}.json".format
# of a unit; and of its first position, the number of rows, and the attempt
fragment_folder = f"{FRAGMENTS}/{{:06d}}".format
fragment_name = f"{FRAGMENTS}/{{:06d}}/{{:06d}}-{{}}-{{}}.arrow".format
# of a unit and an attempt at it: a file with the tokens of unfinished rows
token_checkpoint_name = f"{FRAGMENTS}/{{:06d}}/begun-{{}}.arrow".format
# of a unit: the folder of its crash markers; and of the number of one of them
attempt_folder = f"{ATTEMPTS}/{{:06d}}".format
attempt_name = f"{ATTEMPTS}/{{:06d}}/{{}}.json".format
# of a run; and of the number of a segment of its log
heartbeat_name = f"{RUNS}/{{}}.alive".format
run_log_name = f"{RUNS}/{{}}/{{:06d}}.jsonl".format
# of a token: a file that is written but not published yet, which only local stores use; and one
# that tests whether a store creates files exclusively
staging_name = f"{STAGING}/{{}}".format
probe_name = "_raybatch/probe-{}".format


def _read(pattern: re.Pattern[str], kind: Callable[..., _T], name: str) -> _T | None:
    match = pattern.fullmatch(name)
    return kind(*match.groups()) if match else None


def _units(first: str, stop: str) -> range:
    return range(int(first), int(stop))


# each parses one kind of name, and returns None for others: the unit of a part
part_unit = partial(
    _read, re.compile(rf"data/(?:[^/]+=[^/]*/)*part-{_DIGITS}\.parquet", re.ASCII), int
)
# the unit of a record
done_unit = partial(_read, re.compile(rf"_raybatch/done/{_DIGITS}\.json", re.ASCII), int)
# the unit of any fragment, and of a fragment of checkpointed tokens
fragment_unit = partial(_read, re.compile(rf"_raybatch/frag/{_DIGITS}/[^/]+", re.ASCII), int)
token_checkpoint_unit = partial(
    _read, re.compile(rf"_raybatch/frag/{_DIGITS}/begun-[^/]+", re.ASCII), int
)
# the unit of a crash marker
attempt_unit = partial(_read, re.compile(rf"_raybatch/attempts/{_DIGITS}/\d+\.json", re.ASCII), int)
# the units of a record of joined parts, and of a file with rows in the order of the plan
joined_units = partial(
    _read, re.compile(rf"_raybatch/joined/{_DIGITS}-{_DIGITS}\.json", re.ASCII), _units
)
ordered_units = partial(
    _read, re.compile(rf"_raybatch/plan/[^/]+/ordered-{_DIGITS}-{_DIGITS}\.arrow", re.ASCII), _units
)
# the plan hash of a shard
plan_of_shard = partial(_read, re.compile(r"_raybatch/plan/([^/]+)/[^/]+"), str)
# the run of a segment of a log, and of a heartbeat
run_log_run = partial(_read, re.compile(r"_raybatch/runs/([^/]+)/\d{6,}\.jsonl", re.ASCII), str)
heartbeat_run = partial(_read, re.compile(r"_raybatch/runs/([^/]+)\.alive"), str)
# the token of a probe file
probe_token = partial(_read, re.compile(r"_raybatch/probe-([^/]+)"), str)
