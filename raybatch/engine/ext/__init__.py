"""Optional engine mechanisms, one folder each; see `EngineExtension`."""

from pathlib import Path

from raybatch.config import EngineConfig
from raybatch.engine.phases import MakeExtension
from raybatch.engine.weights.layer_store import PlaceWeights
from raybatch.models.config import read_model_spec
from raybatch.records.share import ShareLink


def placement_of(link: ShareLink | None, folder: Path, engine: EngineConfig) -> PlaceWeights | None:
    """Return the function that loads shared feed-forward weights; None if `link` is None."""
    if link is None:
        return None
    from raybatch.engine.ext.sharing.weights import ShareMember

    return ShareMember.of(link, read_model_spec(folder), num_slots=engine.explicit_buffers).place


def extensions_of(*, shares_weights: bool, may_form_tp_groups: bool) -> tuple[MakeExtension, ...]:
    """Return functions that make the enabled extensions of an engine; imports no others."""
    made: list[MakeExtension] = []
    if shares_weights:
        from raybatch.engine.ext.sharing.extension import SharingModes

        made.append(lambda engine: SharingModes(engine.prepared))
    if may_form_tp_groups:
        from raybatch.engine.ext.tp_groups.extension import TPExtension

        made.append(TPExtension)
    return tuple(made)
