"""Options of a pooling task for one row, with the names of vLLM's PoolingParams."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from raybatch.errors import ConfigError, did_you_mean

# option names of older vLLM versions
_OTHER_NAMES = {"normalize": "use_activation"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling:
    """Options of the embedding or scores of one row; None leaves a choice to the model."""

    use_activation: bool | None = None
    """Normalize embeddings to length 1, turn class scores into probabilities; False gives raw
    numbers. `normalize` is another name for it."""
    dimensions: int | None = None
    """Length of the embedding, for models that can be cut (Matryoshka)."""

    def __post_init__(self) -> None:
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise ConfigError(
                f"pooling.use_activation must be true, false or none, got {self.use_activation!r}"
            )
        size = self.dimensions
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(
                f"pooling.dimensions must be none or a whole number of at least 1, got {size!r}"
            )

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def pooling_of(options: Mapping[str, Any], *, default: Pooling | None = None) -> Pooling:
    """Return options updated from a mapping; an absent one, or None, keeps the default.

    A whole number may be a float, as in Arrow structs. ConfigError: an unknown name (with a
    suggestion), or a value out of range.
    """
    values = {} if default is None else default.given()
    known = [f.name for f in fields(Pooling)]
    for name, value in options.items():
        known_name = _OTHER_NAMES.get(name, name)
        if known_name not in known:
            hint = did_you_mean(str(name), [*known, *_OTHER_NAMES])
            raise ConfigError(f"pooling: unknown option {name!r}{hint}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None:
            values[known_name] = value
    return Pooling(**values)
