"""Stages end each by itself, however the others end, and the table has room for all."""

import json
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_call import kernel_tests, needs
from gpu_call.cache import pack, relocate
from gpu_call.plan import PLAN, Ended, Planned, run_plan
from gpu_call.stage import Stage, num_processors
from gpu_call.table import MAX_LINES, status, table

ROOT = Path(__file__).parents[2]
FAILS = "import sys; sys.exit('no such kernel')"
# with its own process, which must end as well
HANGS = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)"
)
WORKS = "print('done')"


def run(tmp_path, codes, *, ends=0.9, seconds=20.0, device="cpu"):
    plan = [Planned(name=name, ends=ends, ends_on_cpu=ends) for name in codes]
    return run_plan(
        plan,
        seconds=seconds,
        device=device,
        logs=tmp_path,
        command=lambda stage, _: [sys.executable, "-c", codes[stage.name]],
    )


def test_a_stage_that_fails_stops_no_other(tmp_path):
    ended = run(tmp_path, {"one": WORKS, "two": FAILS, "three": WORKS})
    assert [("one", "ok"), ("two", "failed"), ("three", "ok")] == [
        (each.name, each.status) for each in ended
    ]
    assert "no such kernel" in ended[1].log


def test_a_stage_that_hangs_ends_with_all_that_it_has_started(tmp_path):
    plan = [
        Planned(name="hangs", ends=0.1, ends_on_cpu=0.1),
        Planned(name="works", ends=1.0, ends_on_cpu=1.0),
    ]
    codes = {"hangs": HANGS, "works": WORKS}
    hung, worked = run_plan(
        plan,
        seconds=20.0,
        device="cpu",
        logs=tmp_path,
        command=lambda stage, _: [sys.executable, "-c", codes[stage.name]],
    )
    assert ("timeout", "ok") == (hung.status, worked.status)
    child = Path("/proc", hung.log.split()[0])
    stop = time.monotonic() + 5
    while child.exists() and "(zombie)" not in child.joinpath("status").read_text():
        assert time.monotonic() < stop, "the process of a process did not end"
        time.sleep(0.1)


def test_what_runs_beside_others_has_ended_before_a_stage_that_waits(tmp_path):
    made = tmp_path / "made"
    codes = {
        "beside": f"import time; time.sleep(1); open({str(made)!r}, 'w').close()",
        "at once": f"import os, sys; sys.exit(os.path.exists({str(made)!r}))",
        "waits": f"import os, sys; sys.exit(not os.path.exists({str(made)!r}))",
    }
    plan = [
        Planned(name="beside", ends=0.9, ends_on_cpu=0.9, beside=True),
        Planned(name="at once", ends=0.9, ends_on_cpu=0.9, waits=False),
        Planned(name="waits", ends=0.9, ends_on_cpu=0.9),
    ]
    ended = run_plan(
        plan,
        seconds=20.0,
        device="cuda",
        logs=tmp_path,
        command=lambda stage, _: [sys.executable, "-c", codes[stage.name]],
    )
    assert ["ok"] * 3 == [each.status for each in ended]


def test_a_stage_without_time_is_not_begun(tmp_path):
    (ended,) = run(tmp_path, {"one": WORKS}, seconds=0.0)
    assert ("timeout", "there was no time to begin") == (ended.status, ended.log)


def test_ends_rise_and_leave_time_for_the_table():
    in_order = [stage for stage in PLAN if not stage.beside]
    for ends in ([s.ends for s in in_order], [s.ends_on_cpu for s in in_order]):
        assert sorted(set(ends)) == ends
        assert ends[-1] < 1


def test_the_table_has_room_for_all_that_stages_say():
    ended = [
        Ended(name=stage.name, status="failed", seconds=999.0, log="x" * 500) for stage in PLAN
    ]
    texts = ["a figure, " * 40] * 40
    found = {
        stage.name: {"figures": texts, "wrong": texts, "failed": texts, "skipped": texts}
        for stage in PLAN
    }
    lines = table(ended, found)
    assert len(lines) == MAX_LINES
    assert max(map(len, lines)) <= 118


@pytest.mark.parametrize(
    ("ended", "found", "expected"),
    [
        ("ok", {}, "ok"),
        ("failed", {}, "FAILED"),
        ("ok", {"failed": ["decode: out of memory"]}, "FAILED"),
        ("ok", {"wrong": ["attention differs by 0.3"]}, "WRONG"),
        ("timeout", {"wrong": ["attention differs by 0.3"]}, "WRONG"),
    ],
)
def test_the_worst_is_told(ended, found, expected):
    stage = Ended(name="check", status=ended, seconds=1.0, log="last line")
    assert expected == status(stage, found)
    lines = table([stage], {"check": found})
    assert expected in lines[0]
    last = "1 of 1 stages are ok" if expected == "ok" else "0 of 1 stages are ok"
    assert last == lines[-1]


def test_a_cache_that_is_carried_names_its_new_folder(tmp_path):
    made = tmp_path / "made"
    (made / "KEY").mkdir(parents=True)
    names = {"decode.cubin": "/elsewhere/KEY/decode.cubin"}
    (made / "KEY" / "__grp__decode.json").write_text(json.dumps({"child_paths": names}))
    (made / "KEY" / "decode.cubin").write_bytes(b"binary")
    (made / "KEY" / "decode.ptx").write_text("is made again")
    assert pack(made, tmp_path / "tc.tar.gz", max_bytes=1 << 20)
    carried = tmp_path / "carried"
    with tarfile.open(tmp_path / "tc.tar.gz") as archive:
        archive.extractall(carried, filter="data")
    assert 1 == relocate(carried)
    group = json.loads((carried / "KEY" / "__grp__decode.json").read_text())
    assert {"decode.cubin": str(carried / "KEY" / "decode.cubin")} == group["child_paths"]
    assert ["__grp__decode.json", "decode.cubin"] == sorted(
        path.name for path in (carried / "KEY").iterdir()
    )


def test_a_cache_that_is_too_large_is_left_out(tmp_path):
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / "decode.cubin").write_bytes(bytes(1000))
    assert not pack(tmp_path, tmp_path / "tc.tar.gz", max_bytes=10)
    assert not (tmp_path / "tc.tar.gz").exists()


@pytest.mark.parametrize("name", ["gpu_call.sh", "gpu_peer.sh"])
def test_scripts_are_valid_and_say_what_they_take(name):
    script = str(ROOT / "scripts" / name)
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert f"usage: {name} SECONDS" in done.stderr


def test_what_the_table_has_no_room_for_is_counted():
    ended = [Ended(name="bench", status="ok", seconds=1.0)]
    lines = table(ended, {"bench": {"figures": [f"figure {i}" for i in range(7)]}})
    assert lines[3].strip() == "figure 3 (3 more in bench.json)"
    assert len(lines) == 5
    (line, _) = table([replace(ended[0], name="env")], {"env": {"figures": ["x" * 200] * 3}})[1:]
    assert line.endswith("... (1 more in facts.json)")


def test_a_stage_that_was_cut_off_shows_its_last_line():
    ended = [Ended(name="env", status="timeout", seconds=1.0, log="there was no time to begin")]
    assert "timeout: there was no time to begin" in table(ended, {})[0]


@pytest.mark.parametrize(
    ("missing", "seconds", "device", "message"),
    [
        ((), 30, "cpu", "SECONDS must be at least 300 (510 fill ten minutes), got 30"),
        (("triton", "pytest"), 510, "cpu", "missing here: triton, pytest; pip install -r"),
        ((), 510, "cpu", ""),
    ],
)
def test_what_a_host_lacks_is_reported_before_the_stages(
    monkeypatch, missing, seconds, device, message
):
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name in missing else name)
    found = needs.lacking(seconds, device)
    assert found.startswith(message) if message else found == ""


def test_a_host_without_a_compiler_or_a_gpu_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(needs.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(needs.shutil, "which", lambda name: name)
    assert needs.lacking(510, "cuda").startswith("no C compiler (gcc or clang) or no Python.h")
    (tmp_path / "Python.h").touch()
    assert "sees no GPU; --device cpu is a rehearsal" in needs.lacking(510, "cuda")


def test_an_interrupted_session_of_tests_is_no_success(tmp_path, monkeypatch):
    report = "<testsuites><testsuite><testcase name='a'/></testsuite></testsuites>"

    def interrupted(arguments, path, **_):
        path.write_text(report)
        return 2

    monkeypatch.setattr(kernel_tests, "_pytest", interrupted)
    stage = Stage(name="kernel_tests", device="cpu", end=time.monotonic() + 60, work=tmp_path)
    kernel_tests.main(stage)
    assert stage.found["failed"] == ["pytest of kernels stopped after 1 tests (exit code 2)"]
    assert status(Ended(name="kernel_tests", status="ok", seconds=1.0), stage.found) == "FAILED"


def test_processors_are_those_of_the_container(monkeypatch):
    plain_text = Path.read_text
    for text, number in (("150000 100000", 2), ("max 100000", 8), ("5000 100000", 1)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
        monkeypatch.setattr(
            Path,
            "read_text",
            lambda path, *a, text=text: text if path.name == "cpu.max" else plain_text(path, *a),
        )
        assert num_processors() == number
