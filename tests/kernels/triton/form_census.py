"""Counts forms that Triton would compile: `python -m <this module> Qwen3-8B:graphs:1000`.

The real scheduler hands random steps to a decoder of two layers with a model's shapes, on CPU
tensors; products are left out, and a launch is noted instead of made, by the very key that decides
what Triton compiles. With `eager` in place of `graphs` nothing is captured. Behind the number of
steps, the tokens of one that an engine has chosen at the end of its start. A line of JSON each.
"""

import json
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from raybatch.config import DEFAULT_STEP_TOKENS, EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import run_forms
from raybatch.engine.forward.step_graphs import StepGraphs, graph_shape, max_decode_rows
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import allocate_kv_cache
from raybatch.engine.sampling.draw import DrawOptions, draw_ranked_ahead
from raybatch.engine.sampling.sampler import Sampler
from raybatch.kernels.dispatch import _on_gpu
from raybatch.kernels.triton.small_ops import find_ranks
from raybatch.policy.cost.cascade import CascadeThresholds
from raybatch.records.types import Request, Sampling
from tests.engine.real_engines import NoStops
from tests.kernels.triton.big_models import spec_of, weights_of
from tests.kernels.triton.compile_kernels import Recorder

BLOCK_SIZE, NUM_BLOCKS = 64, 1500


class NoProducts(TorchDispatchMode):
    """Leaves out matrix products, which do not change the forms."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten, packet = torch.ops.aten, func.overloadpacket
        if packet is aten.mm:
            return args[0].new_empty(args[0].shape[0], args[1].shape[1])
        # in inference mode it is not decomposed
        if packet is aten.linear:
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[0])
        if packet is aten.addmm_:
            return args[0]
        if packet is aten.embedding:
            return args[0].new_empty(*args[1].shape, args[0].shape[1])
        return func(*args, **(kwargs or {}))


class Captured:
    def replay(self):
        pass


class CapturesOnce:
    def capture(self, function):
        function()
        return Captured()


class Runner(ModelRunner):
    """Runs steps with equal logits, and samples as on a GPU."""

    def forward(self, batch):
        made = super().forward(batch)
        draw(len(made))
        return torch.zeros(len(made), self.spec.vocab_size)

    def clear_blocks(self, block_ids):
        pass

    def copy_blocks(self, source_ids, target_ids):
        pass


def draw(num_rows):
    logits, rows, ones = torch.zeros(num_rows, 512), np.arange(num_rows), np.ones(num_rows)
    options = DrawOptions(ones, np.full(num_rows, 512), 0.9 * ones, 0 * ones, 0.5 * ones)
    draw_ranked_ahead(logits, rows, options, find_ranks=find_ranks)


def requests(rng, first, count):
    """Return requests of all lengths, some of them in groups with a prefix."""
    made = []
    while len(made) < count:
        size = int(rng.choice([1, 1, 1, 2, 5, 16]))
        stem = rng.integers(2, 512, int(rng.choice([1, 70, 500, 2000])) * (size > 1)).tolist()
        for _ in range(size):
            length = int(min(3000, rng.lognormal(4.5, 1.3) + 1))
            number = first + len(made)
            made.append(
                Request(
                    request_id=number,
                    row_id=str(number),
                    prompt_token_ids=np.array(
                        stem + rng.integers(2, 512, length).tolist(), np.int32
                    ),
                    sampling=Sampling(
                        max_tokens=int(rng.integers(1, 200)), n=int(rng.choice([1, 1, 1, 3]))
                    ),
                    seed=number,
                    group_id=first + len(made) if size > 1 else None,
                    prefix_len=len(stem),
                )
            )
    return made


def make_engine(spec, config, *, num_tokens, has_graphs):
    weights, ops = weights_of(spec), _on_gpu()
    cache = allocate_kv_cache(
        spec,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    decoder = Decoder(spec, weights, ops=ops)
    run_forms(
        ops,
        spec,
        weights,
        block_size=BLOCK_SIZE,
        kv_dtype=torch.bfloat16,
        max_tokens=config.token_budget,
        max_rows=max_decode_rows(config),
    )
    draw(3)
    # an engine may choose larger steps than at its start
    config = replace(config, max_batched_tokens=num_tokens)
    shape = graph_shape(config, spec)
    graphs = StepGraphs(decoder, cache, shape=shape, graphs=CapturesOnce()) if has_graphs else None
    runner = Runner(
        spec=spec,
        config=config,
        decoder=decoder,
        cache=cache,
        graphs=graphs,
        num_scrap_blocks=1,
        cascade=CascadeThresholds(num_rows=(2,), min_tokens=(BLOCK_SIZE,)),
    )
    sampler = Sampler(spec.vocab_size, config.max_num_seqs, spec.eos_token_ids)
    return Engine(runner, sampler, NoStops(), config)


def run(engine, rng, num_steps):
    """Run steps with few rows and with many, in turn."""
    num_requests, wanted = 0, 1
    for step in range(num_steps):
        if step % 40 == 0:
            wanted = int(rng.choice([1, 3, 20, 100, 300]))
        if engine.num_unfinished() < wanted:
            made = requests(rng, num_requests, int(rng.integers(1, 1 + wanted)))
            num_requests += len(made)
            engine.add(made)
        engine.step()


def count(name, kind, num_steps, num_tokens=DEFAULT_STEP_TOKENS):
    """Return what a model launches at start and in `num_steps` steps."""
    recorder = Recorder(packs=False)
    JITFunction.run = lambda kernel, *args, **kwargs: recorder.launch(kernel, *args, **kwargs)
    config = EngineConfig(block_size_tokens=BLOCK_SIZE, max_num_seqs=256, max_model_len=8192)
    with NoProducts():
        engine = make_engine(
            spec_of(name), config, num_tokens=num_tokens, has_graphs=kind == "graphs"
        )
        at_start = set(recorder.launches)
        run(engine, np.random.default_rng(0), num_steps)
    stats = engine.stats()
    later = set(recorder.launches) - at_start
    return {
        "forms_at_start": len(at_start),
        "forms_after": len(later),
        "at_start": Counter(key[0] for key in at_start),
        "after": Counter(key[0] for key in later),
        "num_graphs": stats.num_graphs,
        "num_graph_steps": stats.num_graph_steps,
        "num_steps": stats.num_steps,
    }


def main():
    for case in sys.argv[1:]:
        name, kind, *counts = case.split(":")
        sys.stdout.write(json.dumps(count(name, kind, *map(int, counts))) + "\n")


if __name__ == "__main__":
    main()
