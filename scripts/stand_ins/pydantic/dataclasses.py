"""Stands in for pydantic.dataclasses."""

from pydantic import dataclass

__all__ = ["dataclass"]
