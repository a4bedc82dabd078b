"""Runs what the scheduler decided: as one forward pass, or as coroutines of its parts."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from raybatch.engine.batch.forward_batch import BatchBuilder
from raybatch.engine.batch.partition import logits_order, row_slots, split_schedule
from raybatch.engine.forward.runtime import PartBatch
from raybatch.engine.protocols import Runner
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable

_NONE: Mapping[int, str] = MappingProxyType({})


class StepForward:
    """Builds the batches of a step and hands them to the model.

    Args:
        runner: the model with its KV pool.
        table: running sequences.
    """

    def __init__(self, runner: Runner, table: SequenceTable) -> None:
        self._runner = runner
        self._table = table
        self._builder = BatchBuilder(table, len(table.users.count), runner.device)
        self._max_tokens = runner.attn_batch_tokens

    def run(self, schedule: Schedule) -> tuple[torch.Tensor, Mapping[int, str]]:
        """Return the logits of a step [S, V], and by slot why a sequence failed in it."""
        if schedule.moves is not None:
            batch = self._builder.build(schedule)
            return self._runner.forward_offloaded(batch, schedule.moves), _NONE
        if self._max_tokens is None:
            return self._runner.forward(self._builder.build(schedule)), _NONE
        parts = split_schedule(schedule, self._table, self._max_tokens)
        result = self._runner.forward_parts(
            [PartBatch(self._builder.build(part), row_slots(part)) for part in parts]
        )
        order = torch.from_numpy(logits_order(schedule, parts, self._table))
        return result.logits.index_select(0, order.to(result.logits.device)), result.failed
