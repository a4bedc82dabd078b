"""Options with which ray.data.llm and raybatch.llm run the same small vLLM on a CPU.

Rows of ray.data.llm are stored in `rows_of_ray_data_llm.json`, because each of its processors
starts an engine. Exhaustive tests compare them with new ones. To regenerate the file or a part of
it, remove that and run `pytest -m exhaustive tests/compat`.
"""

import json
from pathlib import Path

import pytest

from tests.backends.vllm_engines import BLOCK_TOKENS

__all__ = ["ENGINE", "ENVIRONMENT", "HERE", "PLACED", "THERE", "KeptRows", "compared", "plain"]

_KEPT = Path(__file__).with_name("rows_of_ray_data_llm.json")
THERE, HERE = "ray.data.llm", "raybatch.llm"
ENGINE = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": 8 << 20,
    "enforce_eager": True,
}
ENVIRONMENT = {
    "env_vars": {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
}
PLACED = {
    "placement_group_config": {"bundles": [{"CPU": 1}]},
    "runtime_env": ENVIRONMENT,
    "log_engine_metrics": False,
}


def plain(value):
    """Return a value of a row without the arrays that Ray makes of lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def compared(rows, names):
    """Return these columns of the rows, sorted, because ray.data.llm keeps no order."""
    return sorted(({n: plain(row[n]) for n in names} for row in rows), key=repr)


class KeptRows:
    """Rows of ray.data.llm by the names of what made them.

    Args:
        is_anew: they are made again, and compared with those that are kept.
    """

    def __init__(self, is_anew):
        self._is_anew = is_anew
        self._kept = json.loads(_KEPT.read_text()) if _KEPT.exists() else {}

    def get(self, name, make):
        """Return the rows of a name; `make` returns them as JSON has them."""
        if not self._is_anew:
            assert name in self._kept, f"{name} is not kept: run pytest -m exhaustive tests/compat"
            return self._kept[name]
        rows = json.loads(json.dumps(make()))
        if name not in self._kept:
            self._kept[name] = rows
            _KEPT.write_text(json.dumps(self._kept, indent=1, sort_keys=True) + "\n")
        assert rows == _about(self._kept[name])
        return rows


def _about(value):
    """Return what equals a value whose fractions were summed in another order."""
    if isinstance(value, dict):
        return {name: _about(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_about(inner) for inner in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
