"""The names of `ray.data.llm`, so that a script changes one import to run here.

    from raybatch.llm import build_processor, vLLMEngineProcessorConfig

docs/migrate-from-ray-data-llm.md says what is the same and what is not.
"""

from raybatch.processor import Processor, build_processor
from raybatch.stages.processor_options import ProcessorConfig, vLLMEngineProcessorConfig
from raybatch.stages.processor_stages import (
    ChatTemplateStageConfig,
    DetokenizeStageConfig,
    PrepareMultimodalStageConfig,
    TokenizerStageConfig,
)
from raybatch.stages.refused_processors import (
    HttpRequestProcessorConfig,
    HttpRequestStageConfig,
    ServeDeploymentProcessorConfig,
    SGLangEngineProcessorConfig,
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
