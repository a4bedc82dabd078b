"""Stands in for pydantic.fields."""

from pydantic import FieldInfo

__all__ = ["FieldInfo"]
