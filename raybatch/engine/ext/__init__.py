"""The mechanisms of an engine that only some jobs ask for, a folder each; see `EngineExtension`."""

from pathlib import Path

from raybatch.config import EngineConfig
from raybatch.engine.phases import MakeExtension
from raybatch.engine.weights.layer_store import PlaceWeights
from raybatch.models.config import read_model_spec
from raybatch.records.share import ShareLink


def placement_of(link: ShareLink | None, folder: Path, engine: EngineConfig) -> PlaceWeights | None:
    """Return where weights lie that are shared with others; None where they are not."""
    if link is None:
        return None
    from raybatch.engine.ext.sharing.weights import ShareMember

    return ShareMember.of(link, read_model_spec(folder), num_slots=engine.given_buffers).place


def extensions_of(*, shares_weights: bool, may_form_teams: bool) -> tuple[MakeExtension, ...]:
    """Return what the options of a job ask for; loads no other."""
    made: list[MakeExtension] = []
    if shares_weights:
        from raybatch.engine.ext.sharing.extension import ShareModes

        made.append(lambda engine: ShareModes(engine.prepared))
    if may_form_teams:
        from raybatch.engine.ext.teams.extension import Teamwork

        made.append(Teamwork)
    return tuple(made)
