"""A backend whose steps take what a cost model says, by a clock that only it moves."""

from dataclasses import dataclass, field

import numpy as np

from raybatch.policy.cost.cost_model import CostModel, MeasuredStep, prompt_pairs
from raybatch.records.types import Capacity, Completion, ReplicaStats


@dataclass
class Running:
    request: object
    computed: int
    generated: int = 0

    @property
    def length(self):
        return len(self.request.prompt_token_ids)


@dataclass
class TimedBackend:
    """Prompts in chunks under a budget, a token per step for each row that has all of its prompt.

    Args:
        truth: what steps cost.
        noise: relative error of each step, drawn from a seed.
    """

    truth: CostModel
    max_model_len: int = 4096
    noise: float = 0.0
    error: str = ""
    now: float = 0.0
    num_polls: int = 0
    running: dict = field(default_factory=dict)
    groups: set = field(default_factory=set)
    num_generated: int = 0
    num_cached: int = 0
    is_closed: bool = False

    def __post_init__(self):
        self.random = np.random.default_rng(1)

    def clock(self):
        return self.now

    def capacity(self):
        limits = self.truth.limits
        return Capacity(
            kv_tokens=limits.kv_tokens,
            max_model_len=self.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            block_size=limits.block_size,
        )

    def submit(self, requests):
        for request in requests:
            is_known = request.group_id is not None and request.group_id in self.groups
            self.groups.add(request.group_id)
            computed = request.prefix_len if is_known else 0
            self.num_cached += computed
            self.running[request.request_id] = Running(request, computed)

    def poll(self):
        self.num_polls += 1
        decoding = [r for r in self.running.values() if r.computed == r.length]
        budget = (self.truth.limits.max_batched_tokens or 10**9) - len(decoding)
        counts = self._decode(decoding)
        ready, chunks = list(decoding), []
        for row in self.running.values():
            chunk = min(row.length - row.computed, budget)
            if chunk <= 0 or row in decoding:
                continue
            budget -= chunk
            counts["tokens"] += chunk
            chunks.append((chunk, row.computed))
            row.computed += chunk
            ready += [row] if row.computed == row.length else []
        counts["rows"] = len(ready)
        pairs = prompt_pairs(*np.array(chunks, float).reshape(-1, 2).T)
        seconds = self.truth.predict(MeasuredStep(seconds=1.0, **counts, **pairs))
        self.now += seconds * (1 + self.noise * self.random.normal())
        return self._finish(ready)

    def num_unfinished(self):
        return len(self.running)

    def abort(self, request_ids):
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def stats(self):
        return ReplicaStats(
            generated_tokens=self.num_generated, cached_tokens=self.num_cached, engine_s=self.now
        )

    def close(self):
        self.is_closed = True

    def _decode(self, decoding):
        prefixes = {r.request.group_id: r.request.prefix_len for r in decoding}
        own = [r.length - r.request.prefix_len + r.generated for r in decoding]
        return {
            "tokens": len(decoding),
            "context_reads": sum(own),
            "shared_pairs": sum(r.request.prefix_len for r in decoding),
            "cascade_reads": sum(prefixes.values()),
        }

    def _finish(self, ready):
        self.num_generated += len(ready)
        completions = []
        for row in ready:
            row.generated += 1
            request = row.request
            if row.generated == request.sampling.max_tokens:
                del self.running[request.request_id]
                completions.append(Completion(request_id=request.request_id, error=self.error))
        return completions
