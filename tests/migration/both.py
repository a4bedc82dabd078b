"""Options with which ray.data.llm and raybatch.llm run the same small vLLM on a CPU."""

from tests.backends.vllm_engines import BLOCK_TOKENS

__all__ = ["ENGINE", "ENVIRONMENT", "HERE", "PLACED", "THERE", "compared", "plain"]

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
    """Return these columns of the rows in an order of their own: there they come in any."""
    return sorted(({n: plain(row[n]) for n in names} for row in rows), key=repr)
