"""What a recorded graph repeats, and what it refuses as a capture on a GPU would."""

import pytest
import torch

from tests.engine.forward.recorded_graphs import CaptureError, RecordedGraphs


def test_a_graph_repeats_operations_on_the_values_that_are_there_now():
    x, order, output = torch.rand(4, 6), torch.tensor([3, 0, 1, 2]), torch.empty(4, 3)
    weight = torch.rand(3, 6)

    def step():
        rows = torch.nn.functional.linear(x[order], weight)
        halves = rows.reshape(2, 6).chunk(2, dim=1)
        total = torch.zeros(2, 3)
        total += halves[0] * halves[1]
        output.copy_(torch.cat((torch.softmax(total, dim=-1), rows.topk(3).values[:2])))

    graph = RecordedGraphs().capture(step)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        order.copy_(torch.randperm(4))
        graph.replay()
        made = output.clone()
        step()
        assert torch.equal(output, made)


def test_a_graph_keeps_the_numbers_of_the_host_that_it_was_captured_with():
    x, output, number = torch.ones(3), torch.empty(3), [2.0]
    graph = RecordedGraphs().capture(lambda: output.copy_(x * number[0]))
    number[0] = 5.0
    graph.replay()
    assert [2.0] * 3 == output.tolist()


READS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "int": lambda x: int(x.max()),
    "bool": lambda x: bool(x.any()),
    "condition": lambda x: 1 if x.sum() > 0 else 2,
    "range": lambda x: range(x[0].long()),
    "cpu": lambda x: x.cpu(),
    "mask": lambda x: x[x > 0],
    "assignment by a mask": lambda x: x.__setitem__(x > 0, 0.0),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeats": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_needs_values_on_the_host_cannot_be_captured(read, has_gradients):
    def step():
        with torch.inference_mode(not has_gradients):
            read(torch.ones(3))

    with pytest.raises(CaptureError):
        RecordedGraphs().capture(step)
