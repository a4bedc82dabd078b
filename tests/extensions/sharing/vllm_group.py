"""Engines of vLLM that share weights, each in a process, which tell what they have and answer."""

from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from typing import Any

from raybatch.backends.vllm.start import start_inner
from raybatch.config import BackendConfig, EngineConfig
from raybatch.records.share import ShareLink, ShareRank

REQUESTS = {"1": ([72, 101, 108, 108, 111], 20), "2": ([7, 10, 8], 12), "3": ([9] * 40, 8)}
ENGINE = {"block_size_tokens": 32, "dtype": "float32", "max_num_seqs": 8, "kv_cache_bytes": 4 << 20}


def backend_of(**engine_kwargs: Any) -> BackendConfig:
    return BackendConfig(kind="vllm", options={"engine_kwargs": {"seed": 0} | engine_kwargs})


def answers_of(engine: Any) -> dict[str, list[int]]:
    """Return the tokens of all requests, greedily."""
    for key, (prompt, max_tokens) in REQUESTS.items():
        options = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        engine.add(key, prompt, options)
    found = {}
    while len(found) < len(REQUESTS):
        found |= {answer.key: answer.progress.token_ids.tolist() for answer in engine.step()}
    return found


def _matrices(engine: Any) -> dict[str, int]:
    """Return the numbers of each matrix of a feed-forward module that this process has."""
    worker = engine._client.engine_core.model_executor.driver_worker.worker
    named = worker.model_runner.model.named_parameters()
    return {name: p.numel() for name, p in named if ".mlp." in name}


def _failure_of(engine: Any) -> str:
    """Return how a step ends in which weights cannot be copied; the engine is over after that."""

    def fail(unit: Any, slot: int) -> None:
        raise RuntimeError("the link is down")

    engine.share.buffers.copier.copy = fail
    engine.add("4", [1, 2, 3], {"temperature": 0, "max_tokens": 50, "ignore_eos": True})
    try:
        while not engine.step():
            pass
    except RuntimeError as error:
        return str(error)
    return ""


def _run(
    connection: Any,
    share_rank: ShareRank,
    folder: str,
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> None:
    def exchange(text: str) -> list[str]:
        connection.send(text)
        return connection.recv()

    config = EngineConfig(**ENGINE | {"weights": "shared"} | options)
    engine = start_inner(folder, backend_of(**kwargs), config, link=ShareLink(share_rank, exchange))
    # its turn
    connection.recv()
    share = engine.share
    tokens = answers_of(engine)
    connection.send(
        {
            "tokens": tokens,
            "matrices": _matrices(engine),
            "segment": share._modules.segment.memory.nbytes,
            "copies": engine.weight_counters().num_copies,
            "restarts": share.buffers.counters.num_restarts,
            "failure": _failure_of(engine),
        }
    )
    # until all have answered, as they read what this one owns
    connection.recv()
    engine.close()


def _run_alone(
    connection: Any, _: ShareRank, folder: str, kwargs: dict[str, Any], options: dict[str, Any]
) -> None:
    connection.send("")
    connection.recv()
    engine = start_inner(folder, backend_of(**kwargs), EngineConfig(**ENGINE | options))
    connection.recv()
    connection.send({"tokens": answers_of(engine)})
    connection.recv()
    engine.close()


def outcomes_of(
    folder: str,
    size: int,
    order: Sequence[int],
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[int, dict[str, Any]]:
    """Return what each rank of a group tells; they answer one after the other, in this order.

    A group of one shares nothing. `kwargs` are arguments of vLLM, options those of `EngineConfig`.
    """
    run = _run if size > 1 else _run_alone
    context, connections, processes = get_context("spawn"), [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        arguments = (theirs, ShareRank(rank, size), folder, dict(kwargs or {}), options)
        processes.append(context.Process(target=run, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        connections.append(ours)
    try:
        # what all have loaded, and that all have opened it; one that is alone says nothing
        for _ in range(2 if size > 1 else 1):
            texts = [each.recv() for each in connections]
            for each in connections:
                each.send(texts)
        found = {}
        for rank in order:
            connections[rank].send("go")
            found[rank] = connections[rank].recv()
        for each in connections:
            each.send("end")
        for each in processes:
            each.join()
        return found
    finally:
        for each in processes:
            each.kill()
