import pytest

from raybatch.backends.create import check_options
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError


@pytest.mark.parametrize("kind", ["openai", "transformers"])
def test_backends_that_have_no_quantization_refuse_it(kind):
    backend = BackendConfig(kind=kind)
    with pytest.raises(ConfigError, match=f"the {kind} backend has no such; leave it out"):
        check_options(backend, EngineConfig(quantization="int8"))


def test_the_native_backend_takes_quantization():
    check_options(BackendConfig(), EngineConfig(quantization="fp8"))
