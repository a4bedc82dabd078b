"""Times small batches whose feed-forward blocks are computed at their owners: products, and a tail.

python benchmarks/cas_rounds.py                           # dense-60m, 8 ranks of 2 rows; 4 ranks
python benchmarks/cas_rounds.py --model moe-100m --by shard --out result.json

Float32, one thread per rank. Products: passes over all blocks of the model, for the rows of each
rank separately, and for all rows at once. Tail: one row on rank 0 of a group of processes, in four
modes, each of which adds one technique (Figure 14 of SiDP):

    all_gather   every rank copies every block of others, all at the same time, and has a row
    copies       each rank copies blocks ahead of their use; every rank has a row
    fused        rows go to the owners of blocks; every rank has a row
    skipped      the same, but only rank 0 has a row

CPU seconds are the sum over all ranks. Waiting ranks sleep immediately, so CPU seconds count only
work, and wall times of passes are longer than necessary.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import conditions
import models
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.loaded_model import LoadedModel, load_model
from raybatch.engine.memory.kv_cache import KVCache, allocate_kv_cache
from raybatch.engine.weights.layout import packed_bytes, packed_into, tensors_of
from raybatch.kernels.attention_plan import AttentionPlan, PrefillPart
from raybatch.models.config import read_model_spec
from raybatch.records.share import Unit
from raybatch_extensions.ranks.records import RankInit
from raybatch_extensions.ranks.rendezvous import Rendezvous, RendezvousStore
from raybatch_extensions.sharing.activation_exchange import ActivationExchange
from raybatch_extensions.sharing.layers import SharedLayers
from raybatch_extensions.sharing.ownership import Ownership, ShareBy
from raybatch_extensions.sharing.peers import Peers, connect_peers
from raybatch_extensions.sharing.weights import ShareMember

TIMEOUT_S = 120.0
BLOCK = 16
CONFIG = EngineConfig(device="cpu", dtype="float32", num_threads=1)


def decoder_of(model: LoadedModel) -> Decoder:
    ops = pick_ops(model.spec, model.weights, block_size=BLOCK, may_compile=True)
    return Decoder(model.spec, model.weights, layers=model.placed, ops=ops)


def measure_products(folder: str, *, ranks: int, rows: int, repeats: int) -> dict[str, Any]:
    """Time the blocks of a pass for all rows at once, and for the rows of each rank separately."""
    model = load_model(folder, CONFIG)
    decoder, spec = decoder_of(model), model.spec
    hidden = torch.randn(ranks * rows, spec.model_dim, generator=torch.Generator().manual_seed(0))

    def run(x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        for layer in model.weights.layers:
            decoder.add_shard_(made, x, layer.ffn, layer.ffn.shard)
        return made

    apart, fused = list[float](), list[float]()
    with torch.inference_mode():
        expected = torch.cat([run(part) for part in hidden.split(rows)])
        error = (run(hidden) - expected).norm() / expected.norm()
        for _ in range(repeats):
            began = time.process_time()
            for part in hidden.split(rows):
                run(part)
            middle = time.process_time()
            run(hidden)
            apart.append(middle - began)
            fused.append(time.process_time() - middle)
    return {
        "ranks": ranks,
        "rows_per_rank": rows,
        "relative_error": float(error),
        "apart_ms": _milliseconds(apart),
        "fused_ms": _milliseconds(fused),
        "times_faster": round(statistics.median(apart) / statistics.median(fused), 2),
    }


def one_row(model: LoadedModel) -> tuple[ForwardBatch, KVCache]:
    cache = allocate_kv_cache(
        model.spec, num_blocks=2, block_size=BLOCK, dtype=torch.float32, device=model.device
    )
    plan = AttentionPlan(
        num_decode=0, decode=None, prefill=PrefillPart(starts=(0,), lens=(1,)), segments=()
    )
    batch = ForwardBatch(
        token_ids=torch.tensor([7]),
        positions=torch.tensor([0]),
        slot_mapping=torch.tensor([BLOCK]),
        logits_idx=torch.tensor([0]),
        attention=plan,
    )
    return batch, cache


class Gather:
    """Computes feed-forward blocks that all ranks copy from their owners at the same time."""

    def __init__(self, peers: Peers, layers: SharedLayers, decoder: Decoder, rank: int) -> None:
        self._peers, self._layers, self._decoder, self._rank = peers, layers, decoder, rank
        shards = [layers.sources[unit] for unit in layers.ownership.fetches(rank)]
        self._memory = torch.empty(max(map(packed_bytes, shards)), dtype=torch.uint8)

    def add_ffn_(self, layer: int, x: torch.Tensor, hidden: torch.Tensor) -> None:
        ownership, ffn = self._layers.ownership, self._layers.ffn(layer)
        self._peers.all_gather((layer,))
        for number in range(ownership.num_shards):
            unit = Unit(layer, number)
            if ownership.owner(unit) == self._rank:
                shard = self._layers.owned[unit]
            else:
                source = self._layers.sources[unit]
                shard = packed_into(source, self._memory)
                for part, target in zip(tensors_of(source), tensors_of(shard), strict=True):
                    target.copy_(part)
            self._decoder.add_shard_(x, hidden, ffn, shard)


def run_rank(call: RankInit, folder: str, by: ShareBy, num_passes: int, pipe: Connection) -> None:
    """Run a tail in each mode; send CPU seconds and wall seconds of a pass."""
    torch.set_num_threads(1)
    rendezvous, turns = Rendezvous(call), iter(range(2))

    def all_texts(text: str) -> list[str]:
        turn = next(turns)
        rendezvous.leave(f"text {turn} of {call.rank}", text)
        return [rendezvous.find(f"text {turn} of {rank}") for rank in range(call.size)]

    num_layers = read_model_spec(Path(folder)).num_layers
    ownership = Ownership(size=call.size, num_layers=num_layers, by=by)
    share = ShareMember(ownership=ownership, rank=call.rank, exchange=all_texts)
    model = load_model(folder, CONFIG, place=share.place)
    shared = model.placed
    assert isinstance(shared, SharedLayers), "a member of a group"
    decoder, (batch, cache) = decoder_of(model), one_row(model)
    peers = connect_peers(call, rendezvous, awake_s=0.0)
    exchange = ActivationExchange(peers, model.spec, shared, decoder)
    gather = Gather(peers, shared, decoder, call.rank)

    def row() -> torch.Tensor:
        return decoder.forward(batch, cache)

    def round_of(has_row: bool) -> torch.Tensor | None:
        exchange.begin(int(has_row))
        return row() if has_row else exchange.serve()

    ways: dict[str, tuple[Any, Callable[[], torch.Tensor | None]]] = {
        "all_gather": (gather.add_ffn_, row),
        "copies": (shared.service(decoder), row),
        "fused": (exchange.add_ffn_, partial(round_of, True)),
        "skipped": (exchange.add_ffn_, partial(round_of, not call.rank)),
    }
    found = {}
    for name, (service, run) in ways.items():
        decoder.ffn_service = service
        # warm up
        logits = run()
        peers.all_gather((0,))
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(num_passes):
            logits = run()
        peers.all_gather((0,))
        seconds = time.process_time() - began_cpu, time.perf_counter() - began
        token = None if logits is None else int(logits.argmax())
        found[name] = [x / num_passes for x in seconds], token
    pipe.send((peers.kind, found))
    exchange.close()
    shared.buffers.close()


def measure_tail(folder: str, *, ranks: int, by: ShareBy, num_passes: int) -> dict[str, Any]:
    """Run one row of a group of processes in each mode."""
    store, context, started = RendezvousStore(), multiprocessing.get_context("spawn"), []
    for call in store.calls(1, ranks, timeout_s=TIMEOUT_S):
        ours, theirs = context.Pipe(duplex=False)
        args = call, folder, by, num_passes, theirs
        process = context.Process(target=run_rank, args=args, daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    reports = [pipe.recv() for _, pipe in started]
    for process, _ in started:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank exited with code {process.exitcode}")
    found = {}
    for name in reports[0][1]:
        of_ranks = [ways[name][0] for _, ways in reports]
        found[name] = {
            "cpu_ms": round(1e3 * sum(cpu_s for cpu_s, _ in of_ranks), 3),
            "cpu_ms_of_rank_0": round(1e3 * of_ranks[0][0], 3),
            "pass_ms": round(1e3 * of_ranks[0][1], 3),
        }
    tokens = {ways[1] for ways in reports[0][1].values()}
    least = found["skipped"]["cpu_ms"]
    times = {name: round(way["cpu_ms"] / least, 2) for name, way in found.items()}
    return {
        "ranks": ranks,
        "by": by,
        "group": reports[0][0],
        "tokens_equal": len(tokens) == 1,
        "ways": found,
        "cpu_times_of_skipped": times,
    }


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(1e3 * statistics.median(seconds), 3),
        "range": [round(1e3 * x, 3) for x in (min(seconds), max(seconds))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dense-60m")
    parser.add_argument("--by", choices=("layer", "shard"), default="layer")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the tail")
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / options.model
        models.write(options.model, folder)
        products = measure_products(str(folder), ranks=8, rows=2, repeats=options.repeats)
        print("products", products, flush=True)
        tail = measure_tail(
            str(folder), ranks=options.ranks, by=options.by, num_passes=options.passes
        )
        print("tail", tail, flush=True)
    conditions.write_result(
        options.out, "cas_rounds.py", model=options.model, products=products, tail=tail
    )


if __name__ == "__main__":
    main()
