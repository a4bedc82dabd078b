"""What is true of every engine of one kind, so that nobody else has to ask for its name."""

from collections.abc import Mapping
from dataclasses import dataclass

from raybatch.config import BackendConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """Facts of a kind of backend.

    Args:
        is_endpoint: the engine is somebody else's. It renders, tokenizes and fetches images by
            itself, and nothing is computed here, so that one has room for hundreds of rows.
        has_weights: it computes with those in the folder of the model.
        obeys_engine_options: all of `EngineConfig`, so memory and `engine.admission` among them.
        checks_grammars: as `raybatch.engine.sampling.grammars` does.
        reads_images: beside text.
        has_adapters: rows may name some.
        takes_vllm_options: in `engine_kwargs`.
    """

    is_endpoint: bool = False
    has_weights: bool = True
    obeys_engine_options: bool = False
    checks_grammars: bool = False
    reads_images: bool = False
    has_adapters: bool = False
    takes_vllm_options: bool = False


KINDS: Mapping[str, KindFacts] = {
    # not decided: what the native engine and vLLM have in common
    "auto": KindFacts(),
    "native": KindFacts(obeys_engine_options=True, checks_grammars=True),
    "vllm": KindFacts(reads_images=True, has_adapters=True, takes_vllm_options=True),
    "transformers": KindFacts(checks_grammars=True),
    "openai": KindFacts(is_endpoint=True, has_weights=False, reads_images=True),
    "fake": KindFacts(has_weights=False, has_adapters=True),
}


def facts_of(backend: BackendConfig) -> KindFacts:
    """Return what is true of all engines of the kind of a backend."""
    return KINDS[backend.kind]
