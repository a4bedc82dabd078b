"""The commands that raybatch-submit adds to raybatch, see its entry points."""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer
from annotated_types import Ge
from typer import Argument, Option

from raybatch.cli.flags import (
    AllowErrorRows,
    JobFlags,
    check_path,
    flag,
    with_flags,
    with_job_flags,
    with_model,
)
from raybatch.config import environment
from raybatch.config.option import fields_of, is_hidden
from raybatch.errors import ConfigError
from raybatch_submit.checks import read_env_vars
from raybatch_submit.options import (
    ManifestOptions,
    flag_of,
    read_model_volume,
    read_node_selector,
    read_secrets,
    read_tolerations,
)
from raybatch_submit.probe import find_warnings, probe_cluster, read_address

_write = partial(typer.echo, nl=False)
_note = partial(typer.echo, err=True)


@with_job_flags()
def submit(
    flags: JobFlags,
    address: Annotated[
        str | None, Option(help="Address of the dashboard; default: RAY_API_SERVER_ADDRESS.")
    ] = None,
    submission_id: Annotated[
        str | None, Option(help="Job id; default: file name and time.")
    ] = None,
    no_wait: Annotated[
        bool, Option("--no-wait", help="Print the id and exit without following the log.")
    ] = False,
    working_dir: Annotated[
        Path | None, Option(help="Folder to upload; default: the job file alone.")
    ] = None,
    wheel: Annotated[
        str, Option(help="auto uploads this raybatch, none uses the image's; or a path.")
    ] = "auto",
    env: Annotated[
        list[str] | None,
        Option(metavar="NAME[=VALUE]", help="Environment variable of the job; no secrets."),
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Do not ask for confirmation.")] = False,
    allow_error_rows: AllowErrorRows = False,
) -> None:
    """Run one job on a Ray cluster; `raybatch.cli.app` has the help."""
    from raybatch_submit.submit import Console
    from raybatch_submit.submit import submit as send  # Ray is slow to load

    if note := with_model(flags.mapping):
        _note(note)
    can_ask = sys.stdin.isatty() and not yes
    code = send(
        flags.mapping,
        Console(write=_write, note=_note, confirm=typer.confirm if can_ask else None),
        where=flags.where,
        environment=environment(),
        address=address,
        submission_id=submission_id,
        is_followed=not no_wait,
        working_dir=working_dir,
        wheel=wheel,
        env=env or (),
        allow_error_rows=allow_error_rows,
    )
    raise typer.Exit(code)


_SIZES = ("memory_per_pod", "head_memory", "spill_size")
# options whose flags are texts: parser, type of the flag, metavar
_READ: Mapping[str, tuple[Callable[[Any], Any], Any, str]] = {
    "secrets": (read_secrets, list[str] | None, "VARIABLE=NAME:KEY"),
    "model_volume": (read_model_volume, str | None, "CLAIM[:PATH]"),
    "node_selector": (read_node_selector, list[str] | None, "LABEL=VALUE"),
    "tolerations": (read_tolerations, list[str] | None, "KEY[=VALUE][:EFFECT]"),
    "env_vars": (lambda env: read_env_vars(env, environment()), list[str] | None, "NAME[=VALUE]"),
}


def _flag_of_manifest(name: str, hint: Any) -> inspect.Parameter:  # noqa: ANN401
    option = fields_of(ManifestOptions)[name]
    metavar = "SIZE" if name in _SIZES else None
    kind: Any = get_type_hints(ManifestOptions)[name]
    default = option.get_default(call_default_factory=True)
    if name in _READ:
        _, kind, metavar = _READ[name]
        default = None
    limits = [limit for part in (hint, *get_args(hint)) for limit in get_args(part)[1:]]
    least: Any = next((limit.ge for limit in limits if isinstance(limit, Ge)), None)
    shown = Option(flag_of(name), metavar=metavar, min=least, help=option.description)
    return flag(name, kind, shown, default=default)


def _read_manifest(values: dict[str, Any], command: str) -> ManifestOptions:
    given = {name: value for name, value in values.items() if value is not None}
    return ManifestOptions(**{n: _READ[n][0](v) if n in _READ else v for n, v in given.items()})


_FLAGS_OF_MANIFEST = [
    _flag_of_manifest(name, hint)
    for name, hint in get_type_hints(ManifestOptions, include_extras=True).items()
    if not is_hidden(fields_of(ManifestOptions)[name])
]


@with_flags(_FLAGS_OF_MANIFEST, _read_manifest)
def manifest(
    options: ManifestOptions,
    kind: Annotated[Literal["anyscale", "kuberay", "ray"], Argument(help="The job system.")],
    job_file: Annotated[str, Argument(help="YAML job file.", callback=check_path)],
    output: Annotated[Path | None, Option(help="Write to this file.")] = None,
) -> None:
    """Print or write a manifest; `raybatch.cli.app` has the help."""
    from raybatch_submit.manifest import render_manifest  # Ray is slow to load

    text, notes = render_manifest(kind, job_file, options)
    for note in notes:
        _note(note)
    if output is None:
        _write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot write it: {error}") from error


def check(
    address: Annotated[
        str | None, Option(help="Address of the dashboard; default: RAY_API_SERVER_ADDRESS.")
    ] = None,
) -> None:
    """Print warnings about a cluster; `raybatch.cli.app` has the help."""
    cluster = probe_cluster(read_address(address, environment()), environment(), Path.home())
    warnings = find_warnings(cluster)
    for warning in warnings:
        _write(f"warning: {warning}\n")
    if warnings:
        raise typer.Exit(1)
    _write(f"{cluster.address}: nothing to warn about\n")
