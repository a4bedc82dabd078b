"""Stand-ins for the names of pydantic that raybatch.config uses, for a GPU host without it.

An installed raybatch has pydantic. Here only `__post_init__` checks values.
"""

# importing the submodule of that name replaces the attribute `dataclasses` of this package
import dataclasses as standard
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")

# unused here: options are not checked
ConfigDict = dict


@standard.dataclass(frozen=True, slots=True)
class BeforeValidator:
    func: Callable[[Any], Any]


class SkipValidation: ...


class ValidationError(ValueError):
    """Takes the place of pydantic's error where pydantic is not installed; never raised."""


@standard.dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    pattern: str = ""
    examples: list[str] = standard.field(default_factory=list)


@standard.dataclass(frozen=True, kw_only=True, slots=True)
class FieldInfo:
    """One option: the part of pydantic's FieldInfo that this package reads."""

    annotation: Any
    metadata: list[Any]
    of_class: "standard.Field[Any]"
    description: str | None = None

    @property
    def examples(self) -> list[str]:
        return [each for x in self.metadata if isinstance(x, Field) for each in x.examples]

    def get_default(self, *, call_default_factory: bool) -> Any:  # noqa: ANN401
        factory = self.of_class.default_factory
        if call_default_factory and factory is not standard.MISSING:
            return factory()
        return self.of_class.default


def dataclass(*, config: Mapping[str, Any], **options: bool) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that makes a dataclass with its options in `__pydantic_fields__`.

    It takes the place of pydantic's: values are not checked, and `config` is ignored.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        made: Any = standard.dataclass(**options)(cls)
        hints = get_type_hints(made, include_extras=True)
        made.__pydantic_fields__ = {
            field.name: _info(hints[field.name], field) for field in standard.fields(made)
        }
        build = made.__init__

        @functools.wraps(build)
        def init(self: object, **values: Any) -> None:  # noqa: ANN401
            for name in values.keys() & made.__pydantic_fields__.keys():
                for each in made.__pydantic_fields__[name].metadata:
                    if isinstance(each, BeforeValidator):
                        values[name] = each.func(values[name])
            build(self, **values)

        made.__init__ = init
        return cast(type[_T], made)

    return decorate


def _info(hint: Any, field: "standard.Field[Any]") -> FieldInfo:  # noqa: ANN401
    annotation, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return FieldInfo(annotation=annotation, metadata=metadata, of_class=field)
