"""The folders of this repository with code that users install; the first is raybatch itself."""

from pathlib import Path

_ROOT = Path(__file__).parents[1]
_OTHERS = sorted(path.parent.name for path in _ROOT.glob("raybatch-*/pyproject.toml"))
DISTRIBUTIONS = ("raybatch", *_OTHERS)
