import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import meters
import pytest
from bench_run import Bench
from peer_loop import PeerConfig, Settings
from peer_process import PeerError, PeerProcess
from runlog import RunLog
from suites import PEERS, Part, Peer
from summary import differing_rows, failures, refusals, summarize
from workloads_e2e import Workload, row_digest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
TINY = Workload(name="tiny", kind="random", num_requests=4, prompt_len=3, output_len=2)

# answers every prompt with its own first token, and prints as libraries do
ECHO = f"""
import sys
sys.path.insert(0, {BENCHMARKS!r})
from peer_loop import Answer, serve

class Echo:
    def __init__(self, config):
        print("loading", config.variant)

    def reset(self):
        pass

    def generate(self, requests):
        print("working")
        return Answer(token_ids=[[r.prompt_ids[0]] * r.output_len for r in requests])

    warm_up = generate

serve(Echo, ["pytest", "no-such-package"])
"""


@pytest.fixture
def start(tmp_path):
    def start_script(text):
        script = tmp_path / "peer.py"
        script.write_text(text)
        peer = Peer(name="echo", venv="raybatch", script=str(script), variant="loud")
        config = PeerConfig(model="none", variant="loud", settings=Settings())
        return PeerProcess(peer, Path(sys.executable), config, tmp_path / "echo.log")

    return start_script


def test_a_peer_answers_commands_until_it_is_closed(start, tmp_path):
    with start(ECHO) as process:
        facts = process.answer(timeout_s=60)
        answer = process.run(TINY, None)
        some = process.run(TINY, [2, 3])
    assert list(facts["versions"]) == ["pytest"]
    assert answer["num_requests"] == 4
    assert answer["output_tokens"] == 8
    assert answer["rows_of_wrong_length"] == []
    assert some["row_digests"] == answer["row_digests"][2:]
    assert "loading loud" in (tmp_path / "echo.log").read_text()


def test_a_peer_that_dies_is_an_error_with_its_name(start):
    with (
        start("raise SystemExit(3)") as process,
        pytest.raises(PeerError, match="echo exited with code 3"),
    ):
        process.answer(timeout_s=60)


def test_a_command_to_a_dead_peer_is_an_error(start):
    with start("raise SystemExit(3)") as process:
        with pytest.raises(PeerError):
            process.answer(timeout_s=60)
        with pytest.raises(PeerError):
            process.run(TINY, None)


def test_a_silent_peer_is_an_error(start):
    with (
        start("import sys; sys.stdin.read()") as process,
        pytest.raises(PeerError, match="no answer within 0 s"),
    ):
        process.answer(timeout_s=0.2)


def bench_of(tmp_path, monkeypatch, script, peers=("vllm-eager",)):
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    path = tmp_path / "peer.py"
    path.write_text(script)
    monkeypatch.setattr("peer_process.HERE", tmp_path)
    (tmp_path / "peer_vllm.py").write_text(script)
    (tmp_path / "bin").mkdir(exist_ok=True)
    python = tmp_path / "bin" / "python"
    if not python.exists():
        python.symlink_to(sys.executable)
    return Bench(
        peers=tuple(PEERS[name] for name in peers),
        settings=Settings(),
        num_repetitions=2,
        given_venvs={"vllm": tmp_path, "raybatch": tmp_path, "transformers": tmp_path},
        given_models={"own": tmp_path},
        folder=tmp_path,
        log=RunLog(tmp_path / "log.jsonl", {}),
        quiet_wait_s=0.0,
    )


def test_peers_take_turns_and_a_second_call_has_nothing_to_do(tmp_path, monkeypatch):
    bench = bench_of(tmp_path, monkeypatch, ECHO, ("vllm-eager", "vllm-compiled"))
    part = Part(model="own", engine=(TINY,))
    bench.run(part)
    turns = [r["peer"] for r in bench.log if r["kind"] == "measure"]
    assert turns == ["vllm-eager", "vllm-compiled"] * 2
    num_records = len(list(bench.log))
    bench.run(part)
    assert len(list(bench.log)) == num_records
    assert [row.num_repetitions for row in summarize(bench.log)] == [2, 2]


def test_a_peer_that_fails_is_reported_and_does_not_end_the_run(tmp_path, monkeypatch):
    bench = bench_of(tmp_path, monkeypatch, "raise SystemExit(1)")
    bench.run(Part(model="own", engine=(TINY,)))
    assert summarize(bench.log) == []
    assert "vllm-eager" in failures(bench.log)[0]


def test_cpu_seconds_of_a_tree_are_read_at_the_moment_asked_for():
    meter = meters.TreeMeter(pid=1)
    meter._history = [(10.0, 1.0), (11.0, 3.0), (12.0, 4.0)]
    assert meter.cpu_s_between(10.5, 12.0) == 1.0
    assert meter.cpu_s_between(10.0, 99.0) == 3.0


def test_an_ended_process_has_no_tree():
    assert meters.tree(2**22 + 1) == []


def test_a_process_stays_in_the_tree_when_its_parent_has_gone():
    # the child says its number and waits for its input to end, without its parent
    script = (
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.read(0, 1)\n"
        "    os._exit(0)\n"
        "print(child, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())
        meter = meters.TreeMeter(parent.pid)
        meter.sample()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        meter.sample()
        assert {process.pid for process in meter._members} == {child}


def test_a_pool_is_measured_in_a_process_per_run_with_the_memory_of_its_engines(
    tmp_path, monkeypatch
):
    (tmp_path / "peer_pool.py").write_text(ECHO)
    (tmp_path / "peer_transformers.py").write_text(ECHO)
    names = ("raybatch-pool", "raybatch-pool-2")
    bench = bench_of(tmp_path, monkeypatch, ECHO, names)
    bench.run(Part(model="own", engine=(), pool=(TINY,)))
    measures = [r for r in bench.log if r["kind"] == "measure"]
    assert [r["peer"] for r in measures] == list(names) * 2
    assert [r["engines"] for r in measures] == [[]] * 4
    assert not refusals(bench.log)
    assert failures(bench.log) == []


def test_row_digests_name_the_echoed_tokens(start):
    with start(ECHO) as process:
        process.answer(timeout_s=60)
        (digest,) = process.run(TINY, [0])["row_digests"]
    assert digest in {row_digest([token, token]) for token in range(TINY.vocab_size)}


def test_peers_that_share_an_engine_run_the_same_rows_each_in_its_order(tmp_path, monkeypatch):
    bench = bench_of(tmp_path, monkeypatch, ECHO)
    first, second = (
        dataclasses.replace(PEERS["vllm-eager"], name=order, order=order, process="one")
        for order in ("shuffled", "sorted")
    )
    dataclasses.replace(bench, peers=(first, second)).run(Part(model="own", engine=(TINY,)))
    records = list(bench.log)
    assert [r["peer"] for r in records if r["kind"] == "load"] == ["one"]
    assert [r["peer"] for r in records if r["kind"] == "warm_up"] == ["shuffled"]
    one, other = [r for r in records if r["kind"] == "measure"][:2]
    assert (one["peer"], other["peer"]) == ("shuffled", "sorted")
    assert one["rows"] != other["rows"]
    assert differing_rows(one, other) == []


def test_a_peer_can_have_blocks_of_its_own(tmp_path, monkeypatch):
    script = ECHO.replace('"loading", config.variant', '"blocks of", config.settings.block_size')
    bench = bench_of(tmp_path, monkeypatch, script)
    peer = dataclasses.replace(PEERS["vllm-eager"], block_size=48)
    dataclasses.replace(bench, peers=(peer,)).run(Part(model="own", engine=(TINY,)))
    assert "blocks of 48" in (tmp_path / "vllm-eager.log").read_text()
