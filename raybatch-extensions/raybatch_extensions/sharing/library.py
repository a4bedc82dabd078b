"""What raybatch asks of this folder where `engine.weights` is "shared" or "auto".

Its entry point is in the group `raybatch.sharing`. Parts are imported when they are needed, since a
driver may have no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raybatch.errors import ConfigError
from raybatch.models.config import ModelSpec, read_model_spec
from raybatch_extensions.sharing.ownership import Ownership, default_share_by, max_shards

if TYPE_CHECKING:
    from raybatch.actors.coordinator.parts import MakeExtension, PoolExtension, PoolParts
    from raybatch.backends.vllm.adapter import Adapter
    from raybatch.backends.vllm.engine import WeightShare
    from raybatch.config import EngineConfig
    from raybatch.engine.phases import EngineExtension, PhasedEngine
    from raybatch.engine.weights.layer_store import PlaceWeights
    from raybatch.records.share import ShareLink
    from raybatch.rows.options import StageConfig
    from raybatch.stages.feeder import StageFeeder


def check_slots(config: StageConfig, folder: Path, shares_shards: bool) -> None:
    """Raise ConfigError if a group needs more buffers for the weights of others.

    Args:
        folder: of the model.
        shares_shards: whether engines of the backend support shards.
    """
    size, num_slots = config.pool.share_group, config.engine.explicit_buffers
    if size is None or num_slots is None:
        return
    try:
        spec = read_model_spec(folder)
    except ConfigError:
        if shares_shards:
            raise
        # an engine that supports more models counts layers itself
        return
    by = default_share_by(max_shards(spec), size, shares_shards=shares_shards)
    Ownership(size=size, num_layers=spec.num_layers, by=by).check_slots(num_slots)


def with_chosen_weights(stage: type[StageFeeder]) -> type[StageFeeder]:
    """Return a stage whose engine.weights="auto" is decided; its backend is."""
    from raybatch_extensions.sharing.choice import with_chosen_weights

    return with_chosen_weights(stage)


def placement(link: ShareLink, spec: ModelSpec, engine: EngineConfig) -> PlaceWeights:
    """Return the function that loads the weights of a native engine."""
    from raybatch_extensions.sharing.weights import ShareMember

    return ShareMember.of(link, spec, num_slots=engine.explicit_buffers).place


def engine_extension(engine: PhasedEngine) -> EngineExtension:
    """Return the extension of a native engine that shares weights."""
    from raybatch_extensions.sharing.engine import SharingModes

    return SharingModes(engine.prepared)


def pool_extension(parts: PoolParts) -> PoolExtension:
    """Return the extension of a pool whose replicas share weights."""
    from raybatch_extensions.sharing.pool import Sharing

    make: MakeExtension = Sharing
    return make(parts)


def vllm_share(link: ShareLink, engine: EngineConfig, adapter: Adapter) -> WeightShare:
    """Return what makes the next vLLM engine of this process share weights."""
    from raybatch_extensions.sharing.vllm import VllmShare

    return VllmShare(link, engine, adapter)
