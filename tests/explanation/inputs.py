"""Planned inputs and explanations for tests."""

import json
from dataclasses import asdict, fields

import numpy as np

from raybatch.backends.cost_cache import cost_model_path
from raybatch.config import EngineConfig, PlanConfig
from raybatch.explanation.explain import explain_plan
from raybatch.explanation.record import KVSize
from raybatch.planning.planned import PlannedInput
from raybatch.policy.cost.cost_model import CostModel, EngineLimits
from raybatch.prefix.plan import RowFeatures, plan_rows
from tests.prefix.prompts import keys_of


def plan_prompts(
    prompts, *, block_size=4, expected=None, limit=16, skipped=None, dedup=True, **options
):
    """Plan prompts, given as sequences of token ids, as a job would."""
    keys = keys_of(prompts, block_size)
    limits = np.full(len(prompts), limit)
    lengths = limits.astype(float) if expected is None else np.array(expected, float)
    rows = RowFeatures(keys=keys, expected_tokens=lengths)
    plan, arrangement = plan_rows(rows, PlanConfig(**options), dedup=dedup)
    return PlannedInput(
        keys=keys,
        requested=np.arange(len(prompts)),
        num_rows=len(prompts) + sum((skipped or {}).values()),
        max_tokens=limits,
        expected_tokens=lengths,
        skipped=skipped or {},
        plan=plan,
        whole=plan,
        arrangement=arrangement,
        prompts=[np.array(prompt, np.int32) for prompt in prompts],
    )


def grouped_prompts(rng, *, groups=6, size=5, prefix=32, own=8, vocab=200):
    """Prompts of some groups, mixed."""
    prompts = []
    for _ in range(groups):
        shared = rng.integers(0, vocab, prefix)
        prompts += [np.r_[shared, rng.integers(0, vocab, own)].tolist() for _ in range(size)]
    return [prompts[i] for i in rng.permutation(len(prompts))]


def tree_prompts(rng, *, count, vocab=200):
    """Prompts from a random tree of segments, with copies, parts of others and short ones."""
    stems = [np.zeros(0, np.int64)]
    for branching, length in ((2, 30), (5, 90), (3, 60), (5, 30)):
        stems = [
            np.r_[stem, rng.integers(0, vocab, int(rng.integers(length // 2, length * 2)))]
            for stem in stems
            for _ in range(branching)
        ]
    drawn = [stems[i] for i in rng.zipf(1.3, count) % len(stems)]
    prompts = [np.r_[stem, rng.integers(0, vocab, int(rng.integers(4, 40)))] for stem in drawn]
    prompts += [prompts[0], prompts[1], prompts[2][:70], prompts[3][:5]]
    return [prompts[i].tolist() for i in rng.permutation(len(prompts))]


def explain_prompts(prompts, *, kv_tokens=None, kv_origin="given", planned=None, **options):
    """Explain the plan of prompts; `planned` are options of `plan_prompts`."""
    return explain_plan(
        plan_prompts(prompts, **(planned or {})),
        **{
            "source": "prompts/",
            "model": "demo",
            "plan": PlanConfig(),
            "engine": EngineConfig(),
            "kv": None if kv_tokens is None else KVSize(tokens=kv_tokens, origin=kv_origin),
            **options,
        },
    )


def costs_of(*, max_num_seqs=4, kv_tokens=4000, **costs):
    """Return a cost model whose steps cost what is given, and no more."""
    limits = EngineLimits(
        kv_tokens=kv_tokens, max_num_seqs=max_num_seqs, block_size=8, max_batched_tokens=100
    )
    values = {f.name: 0.0 for f in fields(CostModel) if f.name.endswith("_s")}
    values |= {"token_s": (0.0,), "knots": (), "fit_error": 0.1, **costs}
    return CostModel(**values, limits=limits)


def keep_costs(spec, **costs):
    """Keep a cost model, as `costs_of` makes it, for the engines of a pool."""
    path = cost_model_path(
        spec.model, spec.backend, spec.engine, num_engines_on_host=spec.pool.replicas
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(costs_of(**costs))))
