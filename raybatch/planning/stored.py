"""The content of `plan.json` as a record, and parsing it; errors name the field."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.planning.fingerprint import InputFile

_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSubject:
    """What a plan is made for: input files, plan options and fingerprint of the job."""

    options: Mapping[str, Any]  # plan options
    files: tuple[InputFile, ...]  # name, rows and digest of each file of the source, in order
    fingerprint: Mapping[str, str]  # see `raybatch.planning.fingerprint`
    # folder that file names are relative to, when the plan was made; for people, and to check
    # whether the files have changed
    source: str = ""
    model: str = ""  # as the user named it; for people
    partition_by: tuple[str, ...] = ()  # source columns that partition the output
    partition_types: tuple[str, ...] = ()  # Arrow names of their types
    number: int = (
        1  # of the plan in the output; above 1 for the rest of an input, or input added later
    )
    first_unit: int = 0  # number in the output of its first unit
    # of a head: the files of the rest of the input, which the next plan will have
    files_left: tuple[InputFile, ...] = ()
    # name and reason of skipped, unreadable files of the source
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def rows_left(self) -> int:
        """Rows of the input that have no plan yet."""
        return sum(num_rows for _, num_rows, _ in self.files_left)

    def hash_of(self, shards: Sequence[str], contents: Sequence[str]) -> str:
        """Return the hash of a whole plan.

        `shards` are digests of its shards; `contents` are digests of the requests of each piece
        (prompts, options and seeds), see `contents_digest`.
        """
        options, fingerprint = dict(self.options), dict(self.fingerprint)
        parts = [list(shards), list(contents), options, list(self.files), fingerprint]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def stored(self, **planned: Any) -> "StoredPlan":  # noqa: ANN401 - fields of StoredPlan
        """Return the content of `plan.json`: this subject, and its other fields from `planned`."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return StoredPlan(**known, **planned)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan(PlanSubject):
    """The content of `plan.json`."""

    hash: str  # of all shards
    num_rows: int
    num_units: int
    num_groups: int
    is_reordered: bool  # rows run in another order than the input
    logical_tokens: int  # prompt tokens of requested rows
    computed_tokens: int  # of them, tokens that engines compute when every shared prefix runs once
    block_size: int
    # name and first row of each shard, in order; none if units are stretches of the input, which
    # `units.arrow` describes
    shards: tuple[tuple[str, int], ...]
    version: int = _VERSION

    def __hash__(self) -> int:
        """Return a hash for caches; equal plans have one `hash`."""
        return hash(self.hash)


def covered_files(plans: Sequence[StoredPlan], left: Sequence[InputFile] = ()) -> list[InputFile]:
    """Return the files of all plans, and those of `left`, each once, with the sum of its rows."""
    rows, digests = Counter[str](), dict[str, str]()
    for name, num_rows, digest in (*(file for one in plans for file in one.files), *left):
        rows[name] += num_rows
        digests[name] = digest
    return [(name, rows[name], digest) for name, digest in digests.items()]


def with_heads(plans: Iterable[StoredPlan]) -> tuple[StoredPlan, ...]:
    """Return the plans of a complete output, each head joined to the plan of its other rows."""
    joined: list[StoredPlan] = []
    for stored in plans:
        if not joined or not joined[-1].rows_left:
            joined.append(dataclasses.replace(stored, number=len(joined) + 1))
            continue
        head = joined[-1]
        joined[-1] = dataclasses.replace(
            stored,
            number=head.number,
            hash=f"{head.hash}+{stored.hash}",
            files=tuple(covered_files([head, stored])),
            first_unit=head.first_unit,
            num_units=head.num_units + stored.num_units,
            num_rows=head.num_rows + stored.num_rows,
        )
    return tuple(joined)


def parse_plan(data: bytes, path: str) -> StoredPlan:
    """Parse the content of a plan file; `path` is for messages.

    Raises:
        ConfigError: it is not a plan, or has another version.
    """
    way_out = "restore it from a copy, or choose another folder"
    with error_context(f"{path} is not a plan of this version of raybatch; {way_out}"):
        values = json.loads(data)
        version = values.get("version", _VERSION)
        if version != _VERSION:
            raise ConfigError(f"{path} has version {version}, expected {_VERSION}; {way_out}")
        kinds = get_type_hints(StoredPlan)
        typed = {name: _typed(name, value, kinds.get(name)) for name, value in values.items()}
        return StoredPlan(**typed)


def _typed(name: str, value: Any, kind: Any) -> Any:  # noqa: ANN401 - data of a file
    """Return a value as a field of type `kind`; ValueError: it has another type."""
    kinds = get_args(kind)
    if get_origin(kind) is tuple and isinstance(value, list):
        if Ellipsis in kinds:
            kinds = (kinds[0],) * len(value)
        return tuple(_typed(name, one, k) for one, k in zip(value, kinds, strict=True))
    if get_origin(kind) in (dict, Mapping) and isinstance(value, dict):
        return {key: _typed(name, one, kinds[1]) for key, one in value.items()}
    is_number = kind is int and type(value) is int and value >= 0
    if kind is Any or is_number or (kind in (str, bool) and type(value) is kind):
        return value
    raise ValueError(f"{name} is {value!r}")
