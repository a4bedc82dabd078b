"""Benchmarks are scripts, not a package; those of the laboratory use modules of the others."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "lab" / "benchmarks")]
