import pytest

from raybatch.backends.registry import check_options
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"device_weight_bytes": 1 << 30},
        {"host_kv_bytes": 1 << 30},
        {"speculative_tokens": 4},
        {"cuda_graphs": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("kind", ["openai", "transformers"])
def test_backends_refuse_what_only_the_native_engine_has(kind, options):
    with pytest.raises(ConfigError, match=f"not of the {kind} backend; remove it"):
        check_options(BackendConfig(kind=kind), EngineConfig(**options))


def test_what_is_switched_off_is_no_reason_to_refuse():
    off = EngineConfig(cuda_graphs=False, host_kv_bytes=0, speculative_tokens=0)
    check_options(BackendConfig(kind="transformers"), off)


def test_the_native_backend_takes_quantization():
    check_options(BackendConfig(), EngineConfig(quantization="fp8"))
