"""What `plan.json` says, as a record, and what makes it; another file is refused by field."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.planning.fingerprint import InputFile

_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSubject:
    """What a plan is of, whoever makes it."""

    options: Mapping[str, Any]  # of the plan
    files: tuple[InputFile, ...]  # name, rows and digest of each file of the source, in order
    fingerprint: Mapping[str, str]  # what decides the answers, see `raybatch.planning.fingerprint`
    # folder that the names of the files are relative to, when the plan was made; for people and for
    # looking whether the files are still the same
    source: str = ""
    model: str = ""  # as the user named it; for people
    partition_by: tuple[str, ...] = ()  # columns of the source by which the output is laid out
    partition_types: tuple[str, ...] = ()  # of these columns, as Arrow names them
    number: int = 1  # of the plan among those of the output; above 1 it is of input that came later
    first_unit: int = 0  # number in the output of its first unit
    # name and reason of files of the source that were left out as unreadable
    skipped: tuple[tuple[str, str], ...] = ()

    def hash_of(self, shards: Sequence[str], contents: Sequence[str]) -> str:
        """Return the hash of a whole plan.

        `contents` are digests of all that decides the results of the rows of each piece: prompts,
        options and seeds, see `contents_digest`.
        """
        options, fingerprint = dict(self.options), dict(self.fingerprint)
        parts = [list(shards), list(contents), options, list(self.files), fingerprint]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def stored(self, **planned: Any) -> "StoredPlan":  # noqa: ANN401 - fields of StoredPlan
        """Return what `plan.json` says of a plan, with the fields that planning decides."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return StoredPlan(**known, **planned)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan(PlanSubject):
    """What `plan.json` says."""

    hash: str  # of all shards
    num_rows: int
    num_units: int
    num_groups: int
    is_reordered: bool  # rows run in another order than that of the input
    logical_tokens: int  # prompt tokens of the rows that engines see
    computed_tokens: int  # of them, tokens that engines compute when every shared prefix runs once
    block_size: int
    # name and first row of each shard, in order; none where units are stretches of the input and
    # `units.arrow` says all
    shards: tuple[tuple[str, int], ...]
    version: int = _VERSION

    def __hash__(self) -> int:
        """Return a hash for caches; equal plans have one `hash`."""
        return hash(self.hash)


def parse_plan(data: bytes, path: str) -> StoredPlan:
    """Return the plan of a file.

    Raises:
        ConfigError: it is no plan, or one of another version.
    """
    way_out = "bring it back from a copy, or choose another folder"
    with error_context(f"{path} is not a plan of this version of raybatch; {way_out}"):
        values = json.loads(data)
        version = values.get("version", _VERSION)
        if version != _VERSION:
            raise ConfigError(f"{path} has version {version}; this is {_VERSION}; {way_out}")
        kinds = get_type_hints(StoredPlan)
        typed = {name: _typed(name, value, kinds.get(name)) for name, value in values.items()}
        return StoredPlan(**typed)


def _typed(name: str, value: Any, kind: Any) -> Any:  # noqa: ANN401 - data of a file
    """Return a value as a field of type `kind` holds it; ValueError where it is of another."""
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
