"""Data-parallel ranks of vLLM over a mixture of experts: two engine cores with one backend.

vLLM on a CPU does not exchange tokens between ranks: the processes here are given that part. Expert
parallelism has kernels on GPUs alone.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from raybatch.backends.registry import create_backend
from raybatch.backends.vllm.ranks import RankRouter, RanksEndedError, VllmRanks
from raybatch.backends.vllm.requests import Answer, Progress
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.records.types import Request, Sampling
from tests.engine.tiny_models import build
from tests.stages.support import make_tokenizer

BLOCK = 32
ENGINE = {
    "dtype": "float32",
    "kv_cache_bytes": 4 << 20,
    "max_num_seqs": 32,
    "block_size_tokens": BLOCK,
}
# keys and values, of the layers, heads and numbers of the model below
KV_BYTES_OF_TOKEN = 2 * 3 * 2 * 32 * 4
GROUPS = [[100 + group] * 2 * BLOCK for group in range(4)]
# read by every process of the engine before vLLM is
_EXCHANGE = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.distributed.device_communicators.cpu_communicator":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def extended(module):
            execute(module)
            from tests.backends.rank_exchange import all_gatherv, reduce_scatterv
            module.CpuCommunicator.all_gatherv = all_gatherv
            module.CpuCommunicator.reduce_scatterv = reduce_scatterv

        spec.loader.exec_module = extended
        return spec

sys.meta_path.insert(0, Finder())
"""
_SCRIPT = """
import json, os, sys
from tests.backends.rank_exchange import tell

if __name__ == "__main__":
    print(json.dumps(tell(sys.argv[1])), flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        # one group stays, another goes where there is more room
        ([[1] * 8, [1] * 8, [2] * 8, [2] * 8, [1] * 8], [0, 0, 1, 1, 0]),
        # what is shared is less than a block
        ([[1] * 3, [1] * 3, [1] * 3], [0, 1, 0]),
        # no rank gets too far ahead, whatever it shares
        ([[1] * 8] * 6, [0, 0, 0, 1, 1, 1]),
    ],
)
def test_prompts_go_where_their_beginning_went_last(prompts, expected):
    router = RankRouter(2, max_ahead=2, block_size=4)
    assert [router.choose(np.array(tokens)) for tokens in prompts] == expected


def test_a_rank_whose_requests_have_ended_has_room_again():
    router = RankRouter(2, max_ahead=0, block_size=4)
    assert [router.choose(np.ones(8)) for _ in range(2)] == [0, 1]
    router.end(1)
    assert router.choose(np.ones(8)) == 1


def request(request_id, tokens, **sampling):
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array(tokens, np.int32),
        sampling=Sampling(**{"max_tokens": 12, "ignore_eos": True} | sampling),
    )


def rows():
    return [request(4 * g + i, [*tokens, i]) for g, tokens in enumerate(GROUPS) for i in range(4)]


def run(backend):
    done = {}
    while backend.num_unfinished():
        done |= {c.request_id: c for c in backend.poll()}
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "model"
    make_tokenizer(folder, has_chat_template=False)
    sizes = {"vocab_size": 260, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    experts = {"num_experts": 8, "moe_intermediate_size": 32}
    build("qwen3-moe", **sizes, **experts).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reported(folder, tmp_path_factory):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    scripts = tmp_path_factory.mktemp("scripts")
    (scripts / "sitecustomize.py").write_text(_EXCHANGE)
    (scripts / "two_ranks.py").write_text(_SCRIPT)
    paths = os.pathsep.join([str(scripts), os.getcwd()])
    ended = subprocess.run(
        [sys.executable, str(scripts / "two_ranks.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_give_the_tokens_of_the_native_engine(folder, reported):
    native = create_backend(
        str(folder), BackendConfig(kind="native"), EngineConfig(**ENGINE, device="cpu")
    )
    native.submit(rows())
    expected = {str(i): c.token_ids.tolist() for i, c in run(native).items()}
    native.close()
    assert reported["tokens"] == expected
    assert reported["moved"] == expected["0"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tokens_of_all_ranks_are_counted(reported):
    assert reported["counted"] == [sum(map(len, reported["tokens"].values())), 0, 0]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_row_that_has_tokens_runs(reported):
    assert reported["under_way"] == [1, 0]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_of_a_group_are_computed_by_one_rank(reported):
    # the first of each group computes the blocks of all
    assert reported["cached"] == [0, *[2 * BLOCK] * 3] * len(GROUPS)
    assert reported["ranks"] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_capacity_is_that_of_both_ranks(reported):
    assert reported["max_num_seqs"] == 2 * ENGINE["max_num_seqs"]
    bytes_of_block = BLOCK * KV_BYTES_OF_TOKEN
    assert reported["kv_tokens"] == 2 * (ENGINE["kv_cache_bytes"] // bytes_of_block) * BLOCK


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_row_that_vllm_refuses_is_an_error_row(reported):
    assert "max allowed: 20" in reported["refused"]


@pytest.mark.parametrize(("reason", "is_over"), [("stop", False), ("abort", True)])
def test_what_vllm_drops_is_the_end_of_its_engine_and_not_of_the_row(reason, is_over):
    ranks, answer = object.__new__(VllmRanks), Answer("7", None, reason, None, is_finite=True)
    ranks._ended, ranks._failure, ranks._news = {}, None, asyncio.Event()
    ranks._frontend = SimpleNamespace(answer=lambda output: output, ends_of_one=(KeyError,))

    async def get():
        return answer

    asyncio.run(ranks._wait_for("7", SimpleNamespace(get=get)))
    assert isinstance(ranks._failure, RanksEndedError) == is_over
    assert ({} if is_over else {"7": answer}) == ranks._ended
    assert ranks._news.is_set()


@pytest.mark.parametrize(("error", "is_over"), [(KeyError("one"), False), (OSError("all"), True)])
def test_an_error_of_one_request_is_that_of_its_row(error, is_over):
    ranks = object.__new__(VllmRanks)
    ranks._ended, ranks._failure, ranks._news = {}, None, asyncio.Event()
    ranks._frontend = SimpleNamespace(answer=None, ends_of_one=(KeyError,))

    async def get():
        raise error

    asyncio.run(ranks._wait_for("7", SimpleNamespace(get=get)))
    assert ranks._failure == (error if is_over else None)
    ended = Answer("7", Progress(), "error", None, is_finite=True)
    assert ({} if is_over else {"7": ended}) == ranks._ended
    assert ranks._news.is_set()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_dies_ends_the_engine(reported):
    # by what comes first
    assert reported["after_a_death"] in ("EngineDeadError", "RanksEndedError")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_stand_still_finish_no_step(reported):
    assert reported["steps_while_stopped"] == 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_of_the_engine_end_with_the_one_that_started_them(reported):
    # two engine cores, a worker of each, and who coordinates them
    assert len(reported["processes"]) == 5
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in reported["processes"]):
        assert time.monotonic() < deadline, "processes go on"
        time.sleep(0.2)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"data_parallel_size": 2},
            "vLLM has no data parallelism on CPUs; leave it out and set pool.replicas",
        ),
        ({"enable_expert_parallel": True}, "vLLM has no expert parallelism on CPUs"),
    ],
)
def test_what_kernels_of_cpus_cannot_do_is_refused_at_the_start(folder, kwargs, message):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    backend = BackendConfig(kind="vllm", options={"engine_kwargs": kwargs})
    with pytest.raises(ConfigError, match=message):
        create_backend(str(folder), backend, EngineConfig(**ENGINE))
