"""Names for declaring options: pydantic's, or stand-ins where it is not installed.

Ray depends on pydantic, so every job has it. A host that only runs an engine may lack it: tests
of kernels, `raybatch bench gpu`, scripts/gpu_call.sh.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("pydantic") is not None:
    from annotated_types import Ge, Gt, Le
    from pydantic import BeforeValidator, ConfigDict, Field, SkipValidation, ValidationError
    from pydantic.dataclasses import dataclass
    from pydantic.fields import FieldInfo
else:
    from raybatch.config.unchecked import (
        BeforeValidator,
        ConfigDict,
        Field,
        FieldInfo,
        Ge,
        Gt,
        Le,
        SkipValidation,
        ValidationError,
        dataclass,
    )

__all__ = [
    "BeforeValidator",
    "ConfigDict",
    "Field",
    "FieldInfo",
    "Ge",
    "Gt",
    "Le",
    "SkipValidation",
    "ValidationError",
    "dataclass",
]
