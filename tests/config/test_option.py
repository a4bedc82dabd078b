"""An option is declared once; what it decides follows it to the fingerprint of an output."""

import dataclasses
import inspect
from typing import Annotated, Literal

import pyarrow as pa
import pytest
from annotated_types import Ge, Gt
from pydantic import Field
from pydantic.dataclasses import dataclass

from raybatch.config import EngineConfig
from raybatch.config.option import (
    CHECKED,
    Answers,
    Decides,
    Fraction,
    Hidden,
    NonNegativeFloat,
    Place,
    Positive,
    SecretMapping,
    Speed,
    decided_by,
    fields_of,
    is_default,
    is_hidden,
    options,
    signature_of,
)
from raybatch.errors import ConfigError
from raybatch.job.config import JobConfig
from raybatch.job.job import Job
from raybatch.planning.fingerprint import deciding_options, fingerprint
from raybatch.rows.options import StageConfig, build_stage_config
from raybatch.stages.feeder import LLMStage


@options("made.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class Made:
    """Options of a test."""

    kind: Answers[Literal["dense", "sparse"]] = "dense"
    """Of the made thing."""

    count: Speed[Positive] = 8
    size_bytes: Speed[Positive | None] = None
    tokens: Speed[Positive | Literal["auto"] | None] = "auto"
    share: Speed[Fraction] = 0.5
    above: Speed[Annotated[float, Gt(0)]] = 1.0
    least_s: Speed[NonNegativeFloat | None] = None
    is_on: Place[bool] = False
    where: Place[Annotated[str, Field(examples=["here", "there"])]] = "here"
    names: Place[tuple[str, ...]] = ()
    secrets: Place[SecretMapping] = dataclasses.field(default_factory=dict)
    inner: Answers[Hidden[str]] = "x"
    undecided: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ConfigError("made.count is 13, which is unlucky")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "spars"}, "one of dense, sparse, got 'spars' (did you mean 'sparse'?)"),
        ({"count": 0}, "a whole number of at least 1, got 0"),
        ({"count": True}, "a whole number of at least 1, got True"),
        ({"count": 2.0}, "a whole number of at least 1, got 2.0"),
        ({"size_bytes": "2KiB"}, "at least 1, got '2KiB'; the unit is bytes: write 2048"),
        ({"tokens": 0}, 'a whole number of at least 1, "auto" or none, got 0'),
        ({"share": 1.5}, "a number from 0 to 1, such as 0.01, got 1.5"),
        ({"share": float("nan")}, "a finite number from 0 to 1, such as 0.01, got nan"),
        ({"above": 0}, "a number above 0, got 0"),
        ({"least_s": -1}, "a number of at least 0, got -1"),
        ({"is_on": 1}, "true or false, got 1"),
        ({"where": 3}, "a name such as here or there, got 3"),
        ({"names": 3}, "a list of texts, got 3"),
        ({"secrets": "sesame"}, "a mapping, got a str"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_by_name_with_what_may_be_there(given, message):
    with pytest.raises(ConfigError) as raised:
        Made(**given)
    (name,) = given
    assert str(raised.value).startswith(f"made.{name} must be ")
    assert str(raised.value).endswith(message)


def test_what_goes_together_is_told_by_the_class_itself():
    with pytest.raises(ConfigError, match=r"^made\.count is 13, which is unlucky$"):
        dataclasses.replace(Made(), count=13)


def test_an_unknown_option_of_a_call_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown option 'cuont' \(did you mean 'count'\?\)"):
        Made(cuont=1)


def test_an_empty_mapping_stands_for_null():
    assert Made(secrets=None) == Made()


def test_an_option_that_says_nothing_decides_answers():
    decided = {name: decided_by(field) for name, field in fields_of(Made).items()}
    assert decided["undecided"] is decided["kind"] is Decides.ANSWERS
    assert decided["count"] is Decides.SPEED
    assert decided["where"] is Decides.PLACE


def test_options_that_decide_answers_are_named_unless_they_are_defaults():
    made = Made(count=9, undecided=3, inner="y", is_on=True)
    assert deciding_options(made, prefix="made.") == {"made.undecided": 3, "made.inner": "y"}
    assert is_default(made, "kind")
    assert not is_default(made, "undecided")


def test_an_engine_option_that_nobody_thought_of_reaches_the_fingerprint(monkeypatch):
    """Outputs of two values of an option that says nothing must never be mixed."""
    (field,) = [f for name, f in fields_of(EngineConfig).items() if name == "block_size_tokens"]
    stage = build_stage_config(
        "demo",
        {"prompt": "{text}", "engine": {"block_size_tokens": 32}, "backend": "fake"},
        where="stage",
    )
    schema = pa.schema([("text", pa.string())])
    assert "engine.block_size_tokens" not in fingerprint(stage, schema)
    monkeypatch.setattr(field, "metadata", [m for m in field.metadata if m is not Decides.SPEED])
    assert fingerprint(stage, schema)["engine.block_size_tokens"] == "32"


@pytest.mark.parametrize(("function", "cls"), [(Job, JobConfig), (LLMStage, StageConfig)])
def test_calls_show_the_options_that_users_may_give(function, cls):
    shown = set(inspect.signature(function).parameters)
    given = {name for name, field in fields_of(cls).items() if not is_hidden(field)}
    assert given <= shown
    assert shown - given <= {"self", "task", "seed", "options"}


def test_a_signature_has_the_defaults_of_the_options():
    def make(count: int, **options: object) -> None: ...

    parameters = signature_of(make, Made).parameters
    assert next(iter(parameters)) == "count"
    assert "inner" not in parameters
    assert parameters["share"].default == 0.5
