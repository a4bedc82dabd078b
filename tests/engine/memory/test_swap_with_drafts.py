"""Host memory and drafts in one engine, on real (tiny) models."""

import numpy as np
import pytest

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.sampling.sampler import Sampler
from tests.backends.test_native_backend import greedy_reference, shared_prompts
from tests.engine.fakes import FakeStopChecker, make_request
from tests.engine.memory.test_swap import Choice
from tests.engine.memory.test_swap_models import BLOCK, block_bytes
from tests.engine.test_speculation import ForeseeingDrafter


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3-moe"])
@pytest.mark.parametrize("host", [8, 200])
def test_drafts_of_sequences_that_come_and_go_leave_the_tokens_as_they_are(
    variant, host, rng, tmp_path, monkeypatch, tiny_checkpoint
):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    path = tiny_checkpoint(variant)
    prompts = shared_prompts(rng)
    answers = greedy_reference(variant, prompts)
    config = EngineConfig(
        block_size_tokens=BLOCK,
        device="cpu",
        kv_cache_bytes=22 * block_bytes(path),
        host_kv_bytes=host * block_bytes(path),
        max_batched_tokens=32,
        max_num_seqs=17,
        speculative_tokens=5,
    )
    runner = ModelRunner.load(str(path), config)
    truth = {(i, 0): list(answer) for i, answer in enumerate(answers)}
    engine = Engine(
        runner,
        Sampler(runner.spec.vocab_size, config.max_num_seqs, runner.spec.eos_token_ids),
        FakeStopChecker(),
        config,
        recovery=Choice(),
        make_drafter=lambda table: ForeseeingDrafter(
            table, truth, 0.7, rng=np.random.default_rng(5)
        ),
    )
    length = max(len(answer) for answer in answers)
    engine.add(make_request(i, prompt, max_tokens=length) for i, prompt in enumerate(prompts))
    done = {}
    while engine.num_unfinished():
        done |= {c.request_id: c.token_ids.tolist() for c in engine.step()}
        engine.check()
    assert [done[i] for i in range(len(prompts))] == answers
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.num_swapped_tokens > 0
