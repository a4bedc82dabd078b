"""The command that brings a model to a host before a job wants it."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import typer


def fetch_model(
    model: str,
    only: Literal["tokenizer"] | None,
    to: Path | None,
    on_every_host: bool,
    start_ray: Callable[[], None],
) -> bool:
    """Fetch a model and say where it is; return whether it is on all the hosts asked for."""
    from raybatch.models.prefetch import prefetch  # the clients of stores are slow to load

    with_weights = only is None
    if not on_every_host:
        typer.echo(str(prefetch(model, with_weights=with_weights, to=to)))
        return True
    start_ray()
    from raybatch.actors.executors.ray_prefetch import prefetch_on_every_host

    results = prefetch_on_every_host(model, with_weights=with_weights, to=to)
    for result in results:
        typer.echo(str(result), err=isinstance(result, str))
    return not any(isinstance(result, str) for result in results)
