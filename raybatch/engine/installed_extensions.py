"""Loads optional mechanisms of an engine from other distributions; see `EngineExtension`."""

from pathlib import Path

from raybatch.config import EngineConfig
from raybatch.engine.phases import MakeExtension
from raybatch.engine.weights.layer_store import PlaceWeights
from raybatch.installation import engine_extension, weight_sharing
from raybatch.models.config import read_model_spec
from raybatch.records.share import ShareLink


def placement_of(link: ShareLink | None, folder: Path, engine: EngineConfig) -> PlaceWeights | None:
    """Return the function that loads shared feed-forward weights; None if `link` is None."""
    if link is None:
        return None
    place: PlaceWeights = weight_sharing().placement(link, read_model_spec(folder), engine)
    return place


def extensions_of(*, shares_weights: bool, may_form_tp_groups: bool) -> tuple[MakeExtension, ...]:
    """Return functions that make the enabled extensions of an engine; imports no others."""
    made: list[MakeExtension] = []
    if shares_weights:
        made.append(weight_sharing().engine_extension)
    if may_form_tp_groups and (found := engine_extension("tp_groups")) is not None:
        made.append(found)
    return tuple(made)
