"""Exchange passes of processes: the logits of the model, and a rank that is killed."""

import multiprocessing

import pytest
import torch

from raybatch.engine.loading.loaded_model import load_model
from raybatch_extensions.ranks.records import RankInit
from tests.engine.tiny_models import build
from tests.extensions.sharing.groups import decoder_of
from tests.extensions.sharing.processes import CONFIG, NUM_LAYERS, SIZE, passes_of, run_rank
from tests.tiers import some

# longer than a test may take: the end of a process is noticed before
TIMEOUT_S = 1000.0
# within a pass
DIES_AT = 6


def call(generation, rank):
    return RankInit(
        generation=generation, rank=rank, size=SIZE, host="", port=0, timeout_s=TIMEOUT_S
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("processes")
    build("qwen3-moe-sparse-step", num_hidden_layers=NUM_LAYERS).save_pretrained(made / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(made / "cache"))
        yield made


@pytest.fixture(scope="module")
def reports(folder):
    """The reports of each rank, in order; rank 1 is killed."""
    context, started = multiprocessing.get_context("spawn"), []
    for rank in range(SIZE):
        calls = {name: call(i, rank) for i, name in enumerate(("layer", "shard", "dies"))}
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
    # waited for last: a killed process keeps its id while its peers check it
    for process, _ in started:
        process.join()
    return found


@pytest.mark.parametrize("by", some(["layer", "shard"]))
def test_processes_make_the_logits_of_the_model(by, reports, folder):
    whole = load_model(str(folder / "model"), CONFIG)
    alone, number = decoder_of(whole), ["layer", "shard"].index(by)
    for rank in range(SIZE):
        for of_ranks, logits in zip(passes_of(by), reports[rank][number], strict=True):
            each = of_ranks[rank]
            assert (logits is None) == (not each.num_rows)
            if each.num_rows:
                expected = each.logits(alone, whole.spec)
                found = torch.from_numpy(logits)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))


def test_a_rank_that_is_killed_in_an_exchange_is_noticed_by_the_others(reports):
    assert len(reports[1]) == 2
    ends = [reports[0][2], reports[2][2]]
    assert "the process of rank 1 has exited" in ends
    assert not any("within" in text for text in ends)
