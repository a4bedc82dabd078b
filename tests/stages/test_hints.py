"""What feeders tell their user once."""

import asyncio
import logging

import pyarrow as pa
import pytest

from raybatch.stages.feeder import AllFailedAlarm, NoCpuHint
from tests.stages.support import fake_stage, local


@pytest.fixture
def reported(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: list(caplog.messages)


def test_no_rows_and_no_free_cpu_are_told_with_both_ways_out(reported):
    NoCpuHint(free_cpus=lambda: 0.8, waits_s=(0.0, 0.0)).poll()
    assert len(reported()) == 1
    assert "LLMStage(...).apply(ds)" in reported()[0]
    assert "num_cpus=0" in reported()[0]


def test_a_free_cpu_is_no_reason_for_a_hint(reported):
    NoCpuHint(free_cpus=lambda: 1.0, waits_s=(0.0, 0.0)).poll()
    assert reported() == []


def test_a_cpu_that_is_taken_later_is_seen(reported):
    free = iter([1.0, 0.0])
    NoCpuHint(free_cpus=lambda: next(free), waits_s=(0.0, 0.0)).poll()
    assert len(reported()) == 1


def test_rows_end_the_look_for_cpus(reported):
    hint = NoCpuHint(free_cpus=lambda: 0.0, waits_s=(0.0,))
    hint.stop()
    hint.poll()
    assert reported() == []


def test_a_call_ends_its_feeders_look_for_cpus(model, reported):
    feeder = local(fake_stage(model, prompt="{text}"))()
    asyncio.run(feeder(pa.table({"text": ["a"]})))
    feeder._no_cpu_hint.poll()
    assert reported() == []


def test_one_good_row_silences_the_alarm(reported):
    alarm = AllFailedAlarm()
    alarm.see(["RenderError: x"] * 19)
    alarm.see(["", "RenderError: x"])
    alarm.see(["RenderError: x"] * 1000)
    assert reported() == []


def test_few_failed_rows_raise_no_alarm(reported):
    alarm = AllFailedAlarm()
    alarm.see(["RenderError: x"] * 19)
    alarm.see([])
    assert reported() == []


def test_control_codes_of_an_error_do_not_reach_the_terminal(reported):
    AllFailedAlarm().see(["RenderError: \x1b[2J\u202e"] * 20)
    assert reported()[0].isprintable()
    assert reported()[0].isascii()


def test_function_that_fails_on_every_row_is_told_and_the_job_goes_on(chat_model, reported):
    feeder = local(fake_stage(chat_model, messages=lambda row: row["nope"]))()
    for _ in range(3):
        out = asyncio.run(feeder(pa.table({"text": ["a"] * 15})))
    assert set(out.column("__inference_error__").to_pylist()) == {"RenderError: KeyError: 'nope'"}
    alarms = [message for message in reported() if "EVERY ONE of the first 30 rows" in message]
    assert len(alarms) == 1
    assert "RenderError: KeyError: 'nope'" in alarms[0]
