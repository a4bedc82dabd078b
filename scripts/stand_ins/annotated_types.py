"""Stand-ins for the names of annotated_types that raybatch.config uses; pydantic brings it."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Ge:
    ge: float


@dataclasses.dataclass(frozen=True, slots=True)
class Gt:
    gt: float


@dataclasses.dataclass(frozen=True, slots=True)
class Le:
    le: float
