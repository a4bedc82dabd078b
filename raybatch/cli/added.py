"""The commands that other distributions of this repository add to the command line.

Each is an entry point of the group `raybatch.commands`. A command whose distribution is not
installed is listed as well, and says how to install it.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import typer

from raybatch.errors import MissingDependency
from raybatch.installation import LAB, OPENAI, SUBMIT, TABLES

# command: what it needs, and its help; its entry point has dashes for blanks
ADDED_COMMANDS: Mapping[str, tuple[str, str]] = {
    "submit": (SUBMIT, "Run one job on a Ray cluster and follow its log; exit codes as run."),
    "manifest": (
        SUBMIT,
        "Print a manifest that runs a job file on a job system, with retries that resume.",
    ),
    "check": (
        SUBMIT,
        "Warn about services of a cluster that are open to others; exit code 1 if any are.",
    ),
    "serve": (
        OPENAI,
        "Serve OpenAI's Files and Batches API; a restarted server continues its open batches.",
    ),
    "openai": (OPENAI, "Convert a dataset to OpenAI batch files, and the answers back."),
    "publish": (TABLES, "Add the rows of a finished output to a table, once."),
    "bench calibrate": (
        LAB,
        "Fit the costs of an engine on this host, and print the error of simulations with them.",
    ),
    "bench simulate": (
        LAB,
        "Simulate pools of a calibrated engine: scheduler and queue, on a virtual clock.",
    ),
    "bench plan": (
        LAB,
        "Measure one layer of a model on this host; print how its engine runs rows, and why.",
    ),
    "bench plan memory": (
        LAB,
        "Print the GPU memory of replicas of a model, with and without shared weights.",
    ),
    "bench faults": (
        LAB,
        "Kill replicas, drivers, nodes and disks on purpose, and count the rows; lasts minutes.",
    ),
}


def add_commands(
    app: typer.Typer, bench: typer.Typer, installed: Mapping[str, Any], of: Collection[str]
) -> None:
    """Add the commands of other distributions to the command line and to its group `bench`.

    Args:
        installed: commands and groups by entry point, see `installed_commands`.
        of: the distributions, by what their commands need.
    """
    for path, (needs, help_text) in ADDED_COMMANDS.items():
        if needs not in of:
            continue
        group = bench if path.startswith("bench ") else app
        name = path.removeprefix("bench ")
        command = installed.get(path.replace(" ", "-"))
        if isinstance(command, typer.Typer):
            group.add_typer(command, name=name, help=help_text)
        elif command is not None:
            group.command(name, help=help_text)(command)
        else:
            group.command(
                name,
                help=f"{help_text}\n\nNeeds {needs}",
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            )(_refuse(path, needs))


def _refuse(path: str, needs: str) -> Callable[[], None]:
    def refuse() -> None:
        raise MissingDependency(f"raybatch {path} needs {needs}")

    return refuse
