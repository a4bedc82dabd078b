"""Rows that need all memory that one can have, where KV lives in host memory."""

import numpy as np
import pytest

from raybatch.records.types import SequenceState
from tests.engine.fakes import generate, run_all
from tests.engine.memory.test_kv_offload import make, rows
from tests.engine.sequences.test_groups import expected
from tests.engine.test_engine import VOCAB, tokens_of


@pytest.mark.parametrize(("num_blocks", "host"), [(8, 100), (100, 8)])
def test_a_row_that_fills_all_memory_ends_with_what_it_has(rng, num_blocks, host):
    engine, _ = make(pool_blocks=num_blocks, host=host)
    requests = rows(rng, count=3, max_tokens=60)
    engine.add(requests)
    done = run_all(engine)
    assert {completion.finish_reason for completion in done.values()} == {"capacity"}
    for request in requests:
        found = done[request.request_id, 0].token_ids.tolist()
        assert found == generate(request.prompt_token_ids.tolist(), len(found), VOCAB)
        # 8 blocks hold 32 tokens, and the last one is not among them
        assert len(found) == 32 - 10 + 1


@pytest.mark.parametrize(("num_blocks", "host"), [(8, 100), (100, 8)])
@pytest.mark.parametrize(("max_tokens", "reason"), [(1, "length"), (5, "capacity")])
def test_a_prompt_that_fills_all_memory_still_gets_its_first_token(
    rng, num_blocks, host, max_tokens, reason
):
    engine, _ = make(pool_blocks=num_blocks, host=host)
    (request,) = rows(rng, count=1, prompt=32, max_tokens=max_tokens)
    engine.add([request])
    completion = run_all(engine)[0, 0]
    assert completion.finish_reason == reason
    assert completion.token_ids.tolist() == generate(request.prompt_token_ids.tolist(), 1, VOCAB)


def test_a_row_that_moves_in_with_more_than_memory_holds_keeps_its_tokens(rng):
    (request,) = rows(rng, count=1, prompt=10, max_tokens=60)
    state = SequenceState(
        request=request, sample_idx=0, token_ids=np.arange(25, dtype=np.int32) % VOCAB
    )
    engine, _ = make(pool_blocks=8)
    engine.restore([state])
    (completion,) = engine.step()
    assert (completion.finish_reason, completion.error) == ("capacity", "")
    assert completion.token_ids.tolist() == state.token_ids.tolist()
    assert not engine.num_unfinished()


def test_a_row_that_moves_in_with_all_memory_full_loses_no_token(rng):
    (request,) = rows(rng, count=1, prompt=10, max_tokens=23)
    first, _ = make(pool_blocks=8)
    first.add([request])
    while not any(len(state.token_ids) >= 22 for state in first.checkpoint(22)):
        first.step()
    second, _ = make(pool_blocks=8)
    second.restore(first.export([0]))
    done = run_all(second)
    assert done[0, 0].finish_reason == "length"
    assert tokens_of(done) == expected([request])


@pytest.mark.parametrize(
    ("num_blocks", "host", "option"), [(8, 100, "kv_cache_bytes"), (100, 8, "host_kv_bytes")]
)
def test_a_prompt_beyond_either_memory_is_refused_by_name(rng, num_blocks, host, option):
    engine, _ = make(pool_blocks=num_blocks, host=host)
    engine.add(rows(rng, count=1, prompt=40))
    (completion,) = engine.step()
    assert completion.finish_reason == "capacity"
    assert f"40 tokens, but the KV cache holds 32; raise engine.{option}" in completion.error
