"""The help of each command shows the options that it takes, and no other."""

import dis
import inspect
from dataclasses import replace

import pytest
import typer.main

import raybatch
from raybatch.cli.app import app
from raybatch.cli.flags import nested_options, read_job_flags
from raybatch.errors import ConfigError
from raybatch.inputs.source import Source
from raybatch.job.run import run_spec
from raybatch_openai.batch.run import BatchOptions
from tests.cli.test_cli import run_main


def commands_of(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands_of(typer.main.get_command(app)))
# a value of each flag of a job that is not what it is without
VALUES = {
    "source": "other",
    "sink": "other",
    "model": "other",
    "prompt": "{b}",
    "messages_column": "chat",
    "max_tokens": 7,
    "temperature": 0.5,
    "id_column": "id",
    "replicas": 3,
    "on_error": "raise",
    "columns": "a",
    "output_order": "input",
    "deadline_s": 60.0,
    "overwrite": True,
    "local": True,
    "extend": True,
    "settings": ["plan.seed=3"],
}


def shown(name):
    return {p.name for p in COMMANDS[name].params if not getattr(p, "hidden", False)}


def test_there_is_a_value_for_every_flag_of_a_job():
    assert set(inspect.signature(read_job_flags).parameters) - {"job_file"} == set(VALUES)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_reads_every_option_that_it_declares(name):
    command = inspect.unwrap(COMMANDS[name].callback)
    read = {i.argval for i in dis.get_instructions(command) if i.opname.startswith("LOAD_")}
    read = {name for names in read for name in (names if isinstance(names, tuple) else (names,))}
    # a comprehension inside of the command reads by itself
    read |= {
        free for const in command.__code__.co_consts for free in getattr(const, "co_freevars", ())
    }
    assert set(inspect.signature(command).parameters) <= read


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_job_file_speaks_of_options_of_that_command(name):
    params = {p.name: p for p in COMMANDS[name].params}
    message = getattr(params.get("job_file"), "help", None) or ""
    assert ("--openai" in message) <= ("openai" in params)


@pytest.mark.parametrize(("flag", "executor"), [(True, "local"), (False, "ray"), (None, "auto")])
def test_one_flag_says_where_engines_run(flag, executor):
    job = {"source": "in", "sink": "out", "model": "demo", "prompt": "{a}", "local": flag}
    assert raybatch.Job.from_mapping(told_to(job)).config.executor == executor


def told_to(flags):
    nothing = {"overwrite": False, "extend": False, "job_file": None}
    return nested_options(None, read_job_flags(**dict.fromkeys(VALUES) | nothing | flags))


@pytest.mark.parametrize("flag", VALUES)
def test_help_of_serve_shows_the_flags_that_a_batch_does_not_say_itself(flag):
    try:
        BatchOptions(job=told_to({"model": "demo"} | {flag: VALUES[flag]}))
    except ConfigError as error:
        is_taken = "cannot be set here" not in str(error)
    else:
        is_taken = True
    assert is_taken == (flag in shown("serve"))


def explained(flags):
    """Return what an explanation is made of: which rows, what they ask, and who answers."""
    job = raybatch.Job.from_mapping(told_to(flags))
    planned = run_spec(job.config, Source(schema=None, slices=(), num_rows=0))
    # what becomes of a failed row is not explained
    stage = replace(planned.config, on_error="row")
    config = job.config
    rows = config.source, config.columns, config.executor, config.deadline_s
    return rows, stage, planned.plan, job._stage.pool.spec


@pytest.mark.parametrize("flag", VALUES)
def test_help_of_explain_shows_the_flags_that_change_what_is_explained(flag):
    base = {"source": "in", "sink": "out", "model": "demo", "prompt": "{a}"}
    changed = base | {flag: VALUES[flag]} | ({"prompt": None} if flag == "messages_column" else {})
    assert (explained(base) != explained(changed)) == (flag in shown("explain"))


def test_help_of_run_and_submit_shows_every_flag_of_a_job():
    assert set(VALUES) <= shown("run")
    assert set(VALUES) <= shown("submit")


def test_help_of_retry_errors_leaves_out_what_the_output_says():
    assert set(VALUES) - shown("retry-errors") == {"columns"}


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("run", "--backend", "vllm"), "backend is a job option: use --set"),
        (("explain", "--max-errors", "3"), ""),
        (("fetch", "demo", "--model", "x"), ""),
    ],
)
def test_an_option_without_a_flag_is_told_how_to_be_given(monkeypatch, capsys, arguments, hint):
    assert run_main(monkeypatch, *arguments) == 1
    message = capsys.readouterr().err
    assert "No such option" in message
    assert ("is a job option" in message) == bool(hint)
    assert hint in message
