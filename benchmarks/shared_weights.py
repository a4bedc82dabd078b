"""Measures memory and reads of replicas that share feed-forward weights, and the time of a pass.

OMP_NUM_THREADS=1 python benchmarks/shared_weights.py --out FOLDER [--model dense-60m] [--sizes 2 4]

A group of processes runs on this host. Each process has a segment for the shards that it owns, and
slots for the shards of others. All processes load. Then only one computes, because its copies need
a separate core, and reads the memory of the others while they sleep. So the time of a pass is that
of a rank whose group does not compete for links. Passes decode rows of one block each. Passes with
replicated and shared weights take turns, and the median is printed. Bytes are those of private
pages of a process. The numbers of readers of an owner follow from the orders, if all ranks are in
step. The script fails unless the logits of every rank equal those of the same shards in one
process, bit for bit.
"""

import argparse
import json
import mmap
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import conditions
import models
import numpy as np
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import on_device
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.loading.peak_memory import largest_decodes
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.memory.kv_cache import allocate_kv_cache, kv_bytes_per_token
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.weights.layer_store import ResidentLayers
from raybatch.engine.weights.layout import packed_bytes
from raybatch_extensions.sharing.layers import LentShards, SharedLayers, add_shards_, shard_of
from raybatch_extensions.sharing.ownership import Order, Ownership
from raybatch_extensions.sharing.threshold import fetch_seconds
from raybatch_extensions.sharing.weights import ShareMember

CPU = torch.device("cpu")
SIZES = (2, 4)
ROWS = (1, 8, 32, 128)
NUM_PASSES = 15
# memory of a device as a multiple of the model's weights; KV gets the rest
BUDGET = 1.25
_SEGMENT = "memfd:raybatch-weights"


def config_of(num_rows: int = 1) -> EngineConfig:
    return EngineConfig(device="cpu", dtype="float32", max_num_seqs=num_rows)


class Passes:
    """Runs and times decoding passes of one rank, with the weights of a decoder's store."""

    def __init__(self, prepared: PreparedModel, num_rows: int) -> None:
        config, spec = config_of(num_rows), prepared.model.spec
        self._batch = on_device(largest_decodes(config), IndexUploads(CPU), CPU)
        self._cache = allocate_kv_cache(
            spec,
            num_blocks=2 + num_rows // config.block_size_tokens,
            block_size=config.block_size_tokens,
            dtype=torch.float32,
            device=CPU,
        )

    def run(self, decoder: Decoder) -> torch.Tensor:
        for pool in (self._cache.k, self._cache.v):
            pool.zero_()
        return decoder.forward(self._batch, self._cache)

    def seconds(self, decoder: Decoder) -> float:
        began = time.perf_counter()
        self.run(decoder)
        return time.perf_counter() - began


def in_turns(passes: Passes, decoders: Sequence[Decoder], repeats: int) -> list[float]:
    """Return the median seconds of a pass of each decoder."""
    taken: list[list[float]] = [[] for _ in decoders]
    for _ in range(1 + repeats):
        for seconds, decoder in zip(taken, decoders, strict=True):
            seconds.append(passes.seconds(decoder))
    return [statistics.median(seconds[1:]) for seconds in taken]


def segment_sizes() -> list[int]:
    """Return the bytes of each segment that this process maps, ascending."""
    sizes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if _SEGMENT in line:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            sizes.append(end - begin)
    return sorted(sizes)


def private_bytes(memory: torch.Tensor) -> int:
    """Return the bytes of a tensor in present pages that no other process maps."""
    first = memory.data_ptr() // mmap.PAGESIZE
    last = -(-(memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * (last - first)), np.uint64)
    # bit 63: the page is present; bit 61: the page belongs to a file or is shared
    return mmap.PAGESIZE * int((pages >> np.uint64(61) & np.uint64(5) == 4).sum())


def held_bytes(layers: SharedLayers, ffn_bytes: int) -> dict[str, Any]:
    """Return the feed-forward bytes that a rank holds: its own shards and its slots."""
    own = sum(packed_bytes(shard) for shard in layers.owned.values())
    sizes = segment_sizes()
    slot_bytes = private_bytes(layers.buffers.slots.memory)
    ideal = ffn_bytes / layers.ownership.size + layers.buffers.num_bytes
    return {
        "segments_mapped": len(sizes),
        "largest_segment_bytes": sizes[-1],
        "own_bytes": own,
        "slot_bytes_private": slot_bytes,
        "private_ffn_bytes": own + slot_bytes,
        "share_and_slots_bytes": round(ideal),
        "of_share_and_slots": round((own + slot_bytes) / ideal, 4),
        "of_all_ffn_bytes": round((own + slot_bytes) / ffn_bytes, 4),
    }


def with_slots(
    prepared: PreparedModel, layers: SharedLayers, order: Order, num_slots: int
) -> SharedLayers:
    """Return the store of a rank with another order and number of slots."""
    return SharedLayers(
        prepared.model.weights.layers,
        replace(layers.ownership, order=order),
        layers.rank,
        layers.owned,
        layers.sources,
        CPU,
        num_slots=num_slots,
    )


def decoder_with(prepared: PreparedModel, layers: Any) -> Decoder:  # noqa: ANN401 - a store
    upload = IndexUploads(CPU).upload
    model = prepared.model
    decoder = Decoder(model.spec, model.weights, layers=layers, ops=prepared.ops, upload=upload)
    if isinstance(layers, SharedLayers):
        decoder.ffn_service = layers.service(decoder)
    return decoder


def measure_slots(
    prepared: PreparedModel, whole: Decoder, layers: SharedLayers, num_rows: int, repeats: int
) -> list[dict[str, Any]]:
    """Return stalls and seconds of passes with each number of slots, in both orders."""
    found, passes = [], Passes(prepared, num_rows)
    for order in ("shifted", "in_order"):
        ownership = replace(layers.ownership, order=order)
        for num_slots in range(ownership.least_slots, 2 * ownership.size + 1):
            store = with_slots(prepared, layers, order, num_slots)
            decoder = decoder_with(prepared, store)
            passes.run(decoder)
            before, counted = store.counters, store.counters.wait_s
            replicated_s, shared_s = in_turns(passes, (whole, decoder), repeats)
            after, num_passes = store.counters, 1 + repeats
            found.append(
                {
                    "order": order,
                    "slots": num_slots,
                    "replicated_s": replicated_s,
                    "shared_s": shared_s,
                    "of_replicated": round(shared_s / replicated_s, 3),
                    "copies_per_pass": (after.num_copies - before.num_copies) / num_passes,
                    "bytes_per_pass": (after.num_bytes - before.num_bytes) / num_passes,
                    "bubbles_per_pass": (after.num_stalls - before.num_stalls) / num_passes,
                    "wait_s_per_pass": (store.counters.wait_s - counted) / num_passes,
                }
            )
            store.buffers.close()
    return found


def measure_rows(
    prepared: PreparedModel, whole: Decoder, layers: SharedLayers, rows: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Return seconds of passes by rows, and the seconds of the copies of one pass."""
    store = with_slots(prepared, layers, "shifted", layers.buffers.num_slots)
    pass_fetch_s = fetch_seconds(layers, CPU)
    by_rows = []
    for num_rows in rows:
        passes, decoder = Passes(prepared, num_rows), decoder_with(prepared, store)
        passes.run(decoder)
        replicated_s, shared_s = in_turns(passes, (whole, decoder), repeats)
        by_rows.append({"rows": num_rows, "replicated_s": replicated_s, "shared_s": shared_s})
    store.buffers.close()
    above = [each["rows"] for each in by_rows if each["replicated_s"] >= pass_fetch_s]
    return {
        "copies_s_per_pass": pass_fetch_s,
        "by_rows": by_rows,
        "threshold_rows": min(above, default=None),
    }


def readers(ownership: Ownership) -> dict[str, float]:
    """Return the most and the mean number of ranks that read one owner in a turn, all in step."""
    turns = zip(*(ownership.fetches(rank) for rank in range(ownership.size)), strict=False)
    owners = [[ownership.owner(unit) for unit in turn] for turn in turns]
    most = [max(map(turn.count, turn)) for turn in owners]
    return {"most": max(most, default=0), "mean": statistics.mean(most) if most else 0.0}


def kv_tokens(prepared: PreparedModel, layers: SharedLayers, ffn_bytes: int) -> dict[str, int]:
    """Return the tokens of KV that fit with the weights of one replica, replicated and shared."""
    model = prepared.model
    per_token = kv_bytes_per_token(model.spec, torch.float32)
    budget = BUDGET * model.sizes.total_bytes
    own = sum(packed_bytes(shard) for shard in layers.owned.values())
    shared = model.sizes.total_bytes - ffn_bytes + own + layers.buffers.num_bytes
    return {
        "replicated": int((budget - model.sizes.total_bytes) / per_token),
        "shared": int((budget - shared) / per_token),
    }


def rank_main(connection: Any, options: dict[str, Any]) -> None:  # noqa: ANN401 - of a pipe
    """Load as one rank and answer with its bytes; rank 0 also measures passes."""
    torch.set_num_threads(1)
    ownership: Ownership = options["ownership"]
    rank: int = options["rank"]

    def exchange(text: str) -> list[str]:
        connection.send(text)
        return list(connection.recv())

    member = ShareMember(ownership=ownership, rank=rank, exchange=exchange)
    prepared = PreparedModel.load(options["model"], config_of(), place=member.place)
    layers = prepared.decoder.layers
    assert isinstance(layers, SharedLayers), "a rank of a group"
    decoder = decoder_with(prepared, layers)
    replicated = PreparedModel.load(options["model"], config_of())
    whole = replicated.model.weights
    ffn_bytes = sum(packed_bytes(layer.ffn.shard) for layer in whole.layers)
    same_shards, count = (
        decoder_with(replicated, ResidentLayers(whole.layers)),
        ownership.num_shards,
    )

    def shards(layer: int) -> LentShards:
        block = whole.layers[layer].ffn.shard
        return [(i, nullcontext(shard_of(block, i, count))) for i in range(count)]

    if count > 1:
        same_shards.ffn_service = partial(add_shards_, same_shards, shards)
    passes = Passes(prepared, 4)
    is_equal = torch.equal(passes.run(same_shards).clone(), passes.run(decoder))
    found: dict[str, Any] = {"is_equal": is_equal, **held_bytes(layers, ffn_bytes)}
    connection.send(json.dumps(found))
    connection.recv()
    if rank == 0:
        plain, repeats = replicated.decoder, options["passes"]
        answer = {
            "kv_tokens": kv_tokens(prepared, layers, ffn_bytes),
            "slots": measure_slots(prepared, plain, layers, options["rows"][1], repeats),
            "threshold": measure_rows(prepared, plain, layers, options["rows"], repeats),
        }
        connection.send(json.dumps(answer))
    connection.recv()


def measure_group(
    model: str, ownership: Ownership, rows: Sequence[int], passes: int
) -> dict[str, Any]:
    """Return the bytes that a group of processes holds, and the measurements of rank 0."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank in range(ownership.size):
        ours, theirs = context.Pipe()
        options = {
            "model": model,
            "ownership": ownership,
            "rank": rank,
            "rows": list(rows),
            "passes": passes,
        }
        processes.append(context.Process(target=rank_main, args=(theirs, options), daemon=True))
        processes[-1].start()
        ends.append(ours)
    # exchange twice: after all ranks have loaded, and after all have opened the segments
    for _ in range(2):
        texts = [end.recv() for end in ends]
        for end in ends:
            end.send(texts)
    held = [json.loads(end.recv()) for end in ends]
    if not all(each["is_equal"] for each in held):
        raise SystemExit(f"{ownership}: logits differ from those of the same shards in one process")
    for end in ends:
        end.send("")
    answer = json.loads(ends[0].recv())
    for end, process in zip(ends, processes, strict=True):
        end.send("")
        process.join(60)
    return {"ranks": held, **answer}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="dense-60m", choices=list(models.SHAPES))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--passes", type=int, default=NUM_PASSES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    groups = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / args.model
        models.write(args.model, folder)
        num_layers = models.SHAPES[args.model].num_layers
        for size in args.sizes:
            for by in ("layer", "shard"):
                group = Ownership(size=size, num_layers=num_layers, by=by)
                in_order = Ownership(size=size, num_layers=num_layers, by=by, order="in_order")
                measured = measure_group(str(folder), group, args.rows, args.passes)
                readers_of = {"shifted": readers(group), "in_order": readers(in_order)}
                groups.append({"size": size, "by": by, "readers": readers_of, **measured})
                report(groups[-1])
    conditions.write_result(args.out, "shared_weights.py", model=args.model, groups=groups)


def report(group: dict[str, Any]) -> None:
    """Print the figures of a group."""
    first, tokens = group["ranks"][0], group["kv_tokens"]
    print(
        f"{group['size']} ranks by {group['by']}: {first['private_ffn_bytes'] / 1e6:.1f} MB of "
        f"feed-forward weights a rank ({first['of_share_and_slots']:.3f} of its share and slots, "
        f"{first['of_all_ffn_bytes']:.2f} of all); KV tokens {tokens['replicated']} -> "
        f"{tokens['shared']}; readers {group['readers']['shifted']['most']}, in order "
        f"{group['readers']['in_order']['most']}"
    )
    for each in group["slots"]:
        print(
            f"  {each['order']:>8} {each['slots']} slots: {each['of_replicated']:.3f} of "
            f"replicated, {each['bubbles_per_pass']:.1f} bubbles of {each['copies_per_pass']:.0f} "
            f"copies, {1e3 * each['wait_s_per_pass']:.2f} ms waited"
        )
    threshold = group["threshold"]
    print(
        f"  copies of a pass {1e3 * threshold['copies_s_per_pass']:.1f} ms; a pass takes as long "
        f"from {threshold['threshold_rows']} rows on"
    )


if __name__ == "__main__":
    main()
