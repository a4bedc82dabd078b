"""The benchmark's modules are scripts beside each other, not a package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "lab" / "benchmarks")]
