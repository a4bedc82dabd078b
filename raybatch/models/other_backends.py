"""Which backend runs a checkpoint that the native engine does not, for messages."""

from collections.abc import Sequence

# of a model that generates, which the native engine lacks a part of
SAME_MODEL = (
    "set backend: vllm, or backend: transformers, which runs every causal language model of "
    "transformers and is slow"
)
_IMAGES = "set backend: vllm, which runs many models of text and images"
_NUMBERS = (
    "a model that generates no text may run with backend: vllm and task: embed, classify or score"
)


def backends_for(architectures: Sequence[str]) -> str:
    """Return what to set for a checkpoint, by the architectures that its config.json names.

    Whether a release of vLLM has one of them is known on the hosts of its engines alone.

    Example:
        >>> backends_for(["Gemma2ForCausalLM"]).split(",")[0]
        'set backend: vllm'
    """
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return SAME_MODEL
    if any(name.endswith("ForConditionalGeneration") for name in architectures):
        return _IMAGES
    return _NUMBERS if architectures else SAME_MODEL
