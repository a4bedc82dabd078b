"""The whole engine on real (tiny) models: scheduler, plans, kernels and sampler together."""

import numpy as np
import pytest
import torch

from raybatch.backends.native import create
from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.engine import step
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.errors import ConfigError
from raybatch.models.config import read_model_spec
from raybatch.records.types import Request, Sampling
from tests.engine.references import greedy_tokens, reference_tokens
from tests.engine.tiny_models import build

NUM_TOKENS = 12
VARIANTS = ("llama", "mistral-window", "qwen3-moe")

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint(request.param), request.param


def make_backend(path, *, num_blocks, **options):
    token_bytes = kv_bytes_per_token(read_model_spec(path), torch.float32)
    config = EngineConfig(
        block_size_tokens=4,
        dtype="float32",
        device="cpu",
        kv_cache_bytes=num_blocks * 4 * token_bytes,
        **options,
    )
    return create(str(path), config)


def run(backend, prompts, *, group_ids=None, prefix_len=0, **sampling):
    options = Sampling(**({"max_tokens": NUM_TOKENS} | sampling))
    backend.submit(
        [
            Request(
                request_id=i,
                row_id=str(i),
                prompt_token_ids=np.array(prompt, np.int32),
                sampling=options,
                seed=i,
                group_id=None if group_ids is None else group_ids[i],
                prefix_len=prefix_len,
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    done = {}
    while backend.num_unfinished():
        done |= {(c.request_id, c.sample_idx): c for c in backend.poll()}
    return done


def shared_prompts(rng):
    stems = [rng.integers(1, 211, 29).tolist() for _ in range(2)]
    return [
        stems[rng.integers(2)][: rng.integers(1, 29)]
        + rng.integers(1, 211, rng.integers(1, 9)).tolist()
        for _ in range(14)
    ]


def greedy_reference(variant, prompts):
    return reference_tokens(variant, prompts, NUM_TOKENS)


@pytest.mark.parametrize(
    ("num_blocks", "budget"), [(400, 512), (24, 17)], ids=["roomy", "chunks-and-preemption"]
)
def test_greedy_tokens_equal_transformers(checkpoint, rng, num_blocks, budget):
    path, variant = checkpoint
    prompts = shared_prompts(rng)
    backend = make_backend(path, num_blocks=num_blocks, max_batched_tokens=budget)
    done = run(backend, prompts)
    assert [done[i, 0].token_ids.tolist() for i in range(len(prompts))] == greedy_reference(
        variant, prompts
    )
    assert backend.stats().cached_tokens > 0
    assert (backend.stats().num_preemptions > 0) == (num_blocks == 24)


def test_steps_that_are_sized_by_seconds_change_no_token(checkpoint, rng, monkeypatch):
    path, variant = checkpoint
    monkeypatch.setattr(step, "_CPU_FLOPS", 1.0)
    monkeypatch.setattr(step, "_LEAST_STEP_TOKENS", 8)
    prompts = shared_prompts(rng)
    backend = make_backend(path, num_blocks=400, max_batched_tokens="auto", max_num_seqs=4)
    with monkeypatch.context() as patch:
        sizes, forward = [], type(backend.runner).forward
        patch.setattr(
            type(backend.runner),
            "forward",
            lambda runner, batch: (sizes.append(len(batch.token_ids)), forward(runner, batch))[1],
        )
        done = run(backend, prompts)
    assert [done[i, 0].token_ids.tolist() for i in range(len(prompts))] == greedy_reference(
        variant, prompts
    )
    # they began small, and grew as they were short
    assert sizes[0] <= 8 < max(sizes)


def test_greedy_tokens_of_prefix_groups_equal_transformers(checkpoint, rng):
    path, variant = checkpoint
    # without this, two tokens are almost as good as each other behind one of the prompts
    rng.integers(0, 9)
    stems = [rng.integers(1, 211, 20).tolist() for _ in range(3)]
    group_ids = rng.integers(0, 3, 15).tolist()
    prompts = [stems[g] + rng.integers(1, 211, rng.integers(1, 9)).tolist() for g in group_ids]
    backend = make_backend(path, num_blocks=40, max_batched_tokens=37, enable_prefix_caching=False)
    done = run(backend, prompts, group_ids=group_ids, prefix_len=20)
    expected = greedy_reference(variant, prompts)
    assert expected == [done[i, 0].token_ids.tolist() for i in range(len(prompts))]
    assert backend.stats().cached_tokens == (15 - 3) * 20


def test_random_tokens_do_not_depend_on_the_schedule(checkpoint, rng):
    path, _ = checkpoint
    prompts = shared_prompts(rng)
    outputs = []
    for num_blocks, budget in ((400, 512), (24, 17)):
        backend = make_backend(path, num_blocks=num_blocks, max_batched_tokens=budget)
        done = run(backend, prompts, temperature=0.8, top_p=0.9, n=2)
        outputs.append({key: completion.token_ids.tolist() for key, completion in done.items()})
    assert outputs[0] == outputs[1]


def test_a_row_that_breaks_the_model_spoils_no_other(tmp_path):
    bad_token = 210
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[bad_token] = float("nan")
    model.save_pretrained(tmp_path / "model")
    backend = make_backend(tmp_path / "model", num_blocks=12)
    good = [3, 1, 4, 1, 5, 9]
    done = run(backend, [[*range(1, 30), bad_token]])
    assert done[0, 0].error.startswith("NonFiniteLogits: ")
    # the pool is small, so these rows get the blocks that held NaN
    done = run(backend, [good, good[::-1]])
    expected = [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in (good, good[::-1])]
    assert expected == [done[i, 0].token_ids.tolist() for i in range(2)]


def test_backend_options_are_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"backend.options: .* got step_s"):
        create_backend(str(checkpoint[0]), BackendConfig(options={"step_s": 1}), EngineConfig())
