"""The names of `ray.data.llm`, so that a script changes one import to run here.

    from raybatch.llm import build_processor, vLLMEngineProcessorConfig

docs/how-to/move-from-ray-data-llm.md says what is the same and what is not.
"""

from raybatch.compat.options import ProcessorConfig, vLLMEngineProcessorConfig
from raybatch.compat.processor import Processor, build_processor
from raybatch.compat.stage_options import (
    ChatTemplateStageConfig,
    DetokenizeStageConfig,
    HttpRequestProcessorConfig,
    HttpRequestStageConfig,
    PrepareMultimodalStageConfig,
    ServeDeploymentProcessorConfig,
    SGLangEngineProcessorConfig,
    TokenizerStageConfig,
)

__all__ = [
    "ChatTemplateStageConfig",
    "DetokenizeStageConfig",
    "HttpRequestProcessorConfig",
    "HttpRequestStageConfig",
    "PrepareMultimodalStageConfig",
    "Processor",
    "ProcessorConfig",
    "SGLangEngineProcessorConfig",
    "ServeDeploymentProcessorConfig",
    "TokenizerStageConfig",
    "build_processor",
    "vLLMEngineProcessorConfig",
]
