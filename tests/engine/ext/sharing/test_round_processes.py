"""Rounds of ranks that are processes: the tokens of the model, and a rank that is killed."""

import multiprocessing

import pytest
import torch

from raybatch.engine.loading.loaded_model import load_model
from raybatch.records.team import TeamCall
from tests.engine.ext.sharing.groups import decoder_of
from tests.engine.ext.sharing.processes import CONFIG, NUM_LAYERS, SIZE, passes_of, run_rank
from tests.engine.tiny_models import build

# far longer than a test may take: that a process has ended is seen before
TIMEOUT_S = 1000.0
# within a round
DIES_AT = 6


def call(epoch, rank):
    return TeamCall(epoch=epoch, rank=rank, size=SIZE, host="", port=0, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("processes")
    build("qwen3-moe-sparse-step", num_hidden_layers=NUM_LAYERS).save_pretrained(made / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(made / "cache"))
        yield made


@pytest.fixture(scope="module")
def told(folder):
    """What each rank has to tell, in order; rank 1 is killed."""
    context, started = multiprocessing.get_context("spawn"), []
    for rank in range(SIZE):
        calls = {name: call(i, rank) for i, name in enumerate(("layer", "tile", "dies"))}
        ours, theirs = context.Pipe(duplex=False)
        args = calls, str(folder), DIES_AT if rank == 1 else 0, theirs
        process = context.Process(target=run_rank, args=args, daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    found = [[] for _ in started]
    for texts, (_, pipe) in zip(found, started, strict=True):
        while True:
            try:
                texts.append(pipe.recv())
            except EOFError:
                break
    # asked for late, so that one that was killed keeps its number while others look for it
    for process, _ in started:
        process.join()
    return found


@pytest.mark.parametrize("by", ["layer", "tile"])
def test_processes_make_the_logits_of_the_model(by, told, folder):
    whole = load_model(str(folder / "model"), CONFIG)
    alone, number = decoder_of(whole), ["layer", "tile"].index(by)
    for rank in range(SIZE):
        for of_ranks, logits in zip(passes_of(by), told[rank][number], strict=True):
            each = of_ranks[rank]
            assert (logits is None) == (not each.num_rows)
            if each.num_rows:
                expected = each.logits(alone, whole.spec)
                found = torch.from_numpy(logits)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))


def test_a_rank_that_is_killed_in_a_round_is_missed_by_the_others(told):
    assert len(told[1]) == 2
    ends = [told[0][2], told[2][2]]
    assert "the process of rank 1 has ended" in ends
    assert not any("within" in text for text in ends)
