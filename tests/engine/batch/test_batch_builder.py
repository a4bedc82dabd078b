from dataclasses import replace

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import BatchBuilder, LateTokens, PlanBuilder, on_device
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import Sequence, SequenceTable
from raybatch.policy.cost.cascade import CascadeThresholds
from tests.engine.fakes import make_request
from tests.engine.lazy_queue import LazyQueue

PREFIX = np.arange(500, 508)


def from_tokens(min_tokens):
    """Two rows or more use cascade attention from `min_tokens` shared tokens on."""
    return CascadeThresholds(num_rows=(2,), min_tokens=(min_tokens,))


class Steps:
    """A scheduler and a batch builder; every generated token is 7."""

    def __init__(self, *prompts, budget=64, block_size=4, max_tokens=8, min_tokens=768):
        self.table = SequenceTable(
            max_slots=8, num_blocks=32, block_size=block_size, max_model_len=64
        )
        blocks = BlockManager(32, block_size)
        self.scheduler = Scheduler(
            blocks, self.table, max_batched_tokens=budget, enable_prefix_caching=True
        )
        self.builder = BatchBuilder(self.table, 32)
        self.builder._plans = PlanBuilder(self.table, 32, reads=from_tokens(min_tokens))
        self.max_tokens, self.num_added = max_tokens, 0
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt):
        prompt = np.asarray(prompt)
        self.scheduler.add(
            Sequence(
                request=make_request(self.num_added, prompt),
                sample_idx=0,
                arrival=self.num_added,
                max_len=len(prompt) + self.max_tokens,
            )
        )
        self.num_added += 1

    def step(self):
        schedule = self.scheduler.schedule()
        batch = self.builder.build(schedule)
        slots = self.scheduler.advance(schedule)
        self.table.append_tokens(slots, np.full(len(slots), 7))
        return batch


def segments(batch):
    return [
        (part.query_idx.tolist(), part.block_ids.tolist(), part.num_tokens, part.first_position)
        for part in batch.attention.segments
    ]


def decode(batch):
    part = batch.attention.decode
    return list(
        zip(part.block_ids.tolist(), part.owners.tolist(), part.num_valid.tolist(), strict=True)
    )


def test_prompts_are_packed_one_after_another():
    batch = Steps([1, 2, 3, 4, 5], [6, 7]).step()
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.slot_mapping.tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert batch.logits_idx.tolist() == [4, 6]
    assert (batch.attention.prefill.starts, batch.attention.prefill.lens) == ((0, 5), (5, 2))
    assert batch.attention.decode is None


def test_decode_rows_come_before_chunks():
    steps = Steps([1, 2, 3, 4, 5])
    steps.step()
    steps.add([8, 9])
    batch = steps.step()
    assert batch.token_ids.tolist() == [7, 8, 9]
    assert batch.positions.tolist() == [5, 0, 1]
    assert batch.slot_mapping.tolist() == [5, 8, 9]
    assert batch.logits_idx.tolist() == [0, 2]
    assert (batch.attention.num_decode, batch.attention.prefill.starts) == (1, (1,))


def test_decode_blocks_are_in_memory_order_with_their_valid_positions():
    steps = Steps([1, 2, 3, 4, 5], [6, 7])
    steps.step()
    batch = steps.step()
    assert decode(batch) == [(0, 0, 4), (1, 0, 2), (2, 1, 3)]
    assert batch.attention.decode.first_positions.tolist() == [0, 4, 0]
    assert batch.attention.decode.is_contiguous


def test_a_cut_prompt_has_no_logits():
    batch = Steps(range(10), budget=6).step()
    assert batch.logits_idx.tolist() == []


def test_a_chunk_reads_its_earlier_positions_as_context():
    steps = Steps(range(16), budget=6)
    steps.step()
    assert segments(steps.step()) == [([0, 1, 2, 3, 4, 5], [0, 1], 6, 0)]
    assert segments(steps.step()) == [([0, 1, 2, 3], [0, 1, 2], 12, 0)]


def test_a_chunk_that_starts_inside_its_first_block_reads_that_block():
    steps = Steps(range(8), budget=3)
    steps.step()
    assert segments(steps.step()) == [([0, 1, 2], [0], 3, 0)]


def test_members_that_start_together_read_their_prefix_in_one_part():
    steps = Steps(np.r_[PREFIX, 1], np.r_[PREFIX, 2], np.r_[PREFIX, 3, 4])
    assert segments(steps.step()) == [([9, 10, 11], [0, 1], 8, 0)]


def test_a_decode_row_joins_the_part_of_a_chunk_with_the_same_prefix():
    steps = Steps(np.r_[PREFIX, 1])
    steps.step()
    steps.add(np.r_[PREFIX, 2])
    batch = steps.step()
    assert segments(batch) == [([0, 1], [0, 1], 8, 0)]
    assert decode(batch) == [(2, 0, 2)]


def test_few_decode_rows_read_a_shared_prefix_as_pairs():
    steps = Steps(np.r_[PREFIX, 1], np.r_[PREFIX, 2])
    steps.step()
    batch = steps.step()
    assert segments(batch) == []
    assert decode(batch) == [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4), (2, 0, 2), (3, 1, 2)]
    assert not batch.attention.decode.is_contiguous


def test_enough_decode_rows_read_a_shared_prefix_in_one_part():
    steps = Steps(*(np.r_[PREFIX, i] for i in range(3)), min_tokens=8)
    steps.step()
    batch = steps.step()
    assert segments(batch) == [([0, 1, 2], [0, 1], 8, 0)]
    assert decode(batch) == [(2, 0, 2), (3, 1, 2), (4, 2, 2)]


def test_a_run_that_is_too_short_is_read_by_each_row():
    steps = Steps(*(np.r_[PREFIX, i] for i in range(3)), min_tokens=9)
    steps.step()
    assert segments(steps.step()) == []


def test_a_tree_of_prefixes_gives_one_part_per_shared_run():
    stem, twig = [*PREFIX[:4]], [1, 2, 3, 4]
    prompts = ([*stem, *twig, 5], [*stem, *twig, 6], [*stem, *twig, 7], [*stem, 8], [*stem, 9])
    steps = Steps(*prompts, min_tokens=4)
    steps.step()
    found = segments(steps.step())
    assert sorted(found) == [([0, 1, 2], [1], 4, 4), ([0, 1, 2, 3, 4], [0], 4, 0)]


def test_blocks_of_a_waiting_chunk_are_not_read():
    steps = Steps([1], [2], range(20), budget=8)
    steps.step()
    steps.scheduler._budget = 2
    batch = steps.step()
    assert decode(batch) == [(0, 0, 2), (1, 1, 2)]
    assert (segments(batch), batch.attention.prefill) == ([], None)


def plan_of(tables, chunk_slots, *, num_computed=12):
    """Return the plan of a step in which `chunk_slots` of these block tables compute a token."""
    steps = Steps()
    for i, blocks in enumerate(tables):
        prompt = np.arange(num_computed + 1)
        record = Sequence(request=make_request(i, prompt), sample_idx=0, arrival=i, max_len=30)
        steps.table.place(record, blocks)
    slots = np.arange(len(tables))
    steps.table.users.extend(slots, np.full(len(tables), 3), steps.table.block_table)
    chosen = np.array(chunk_slots, np.int64)
    schedule = Schedule(
        decode_slots=np.empty(0, np.int64),
        chunk_slots=chosen,
        chunk_starts=np.full(len(chosen), num_computed),
        chunk_lens=np.ones(len(chosen), np.int64),
    )
    return steps.builder._plans.build(schedule)


def test_shared_blocks_with_a_gap_between_them_are_two_parts():
    parts = plan_of([[5, 6, 9], [5, 7, 9]], [0, 1]).segments
    assert sorted((p.block_ids.tolist(), p.first_position) for p in parts) == [
        ([5], 0),
        ([6], 4),
        ([7], 4),
        ([9], 8),
    ]


def test_blocks_that_no_row_of_the_step_reads_are_left_out():
    parts = plan_of([[1, 2, 3], [1, 2, 4], [5, 6, 7]], [2]).segments
    assert [part.block_ids.tolist() for part in parts] == [[5, 6, 7]]


def logits_decode(batch):
    part = batch.logits_attention.decode
    return list(
        zip(part.block_ids.tolist(), part.owners.tolist(), part.num_valid.tolist(), strict=True)
    )


def test_the_last_layer_sees_the_end_of_a_prompt_as_a_decode_row():
    steps = Steps([1, 2, 3, 4, 5])
    steps.step()
    steps.add([8, 9])
    batch = steps.step()
    assert batch.logits_idx.tolist() == [0, 2]
    assert batch.logits_attention.num_decode == 2
    assert batch.logits_attention.prefill is None
    assert logits_decode(batch) == [(0, 0, 4), (1, 0, 2), (2, 1, 2)]


def test_a_chunk_that_does_not_end_its_prompt_has_no_row_in_the_last_layer():
    batch = Steps(range(10), budget=6).step()
    assert batch.logits_attention.num_decode == 0
    assert batch.logits_attention.decode is None


def test_a_step_in_which_all_rows_need_logits_has_one_plan():
    steps = Steps([1, 2, 3])
    steps.step()
    assert steps.step().logits_attention is None


def step_with_drafts(steps, drafts):
    schedule = steps.scheduler.schedule(drafts)
    batch = steps.builder.build(schedule)
    return schedule, batch


def test_drafts_are_rows_after_that_of_their_sequence():
    steps = Steps([1, 2, 3, 4, 5], [6, 7])
    steps.step()
    schedule, batch = step_with_drafts(steps, {0: [30, 31, 32], 1: [40]})
    assert batch.token_ids.tolist() == [7, 30, 31, 32, 7, 40]
    assert batch.positions.tolist() == [5, 6, 7, 8, 2, 3]
    # the third draft is in a separate block, which the rows before do not see
    assert batch.slot_mapping.tolist() == [5, 6, 7, 12, 10, 11]
    assert batch.logits_idx.tolist() == list(range(6))
    assert sorted(decode(batch), key=lambda entry: entry[1]) == [
        (0, 0, 4),
        (1, 0, 2),
        (0, 1, 4),
        (1, 1, 3),
        (0, 2, 4),
        (1, 2, 4),
        (0, 3, 4),
        (1, 3, 4),
        (3, 3, 1),
        (2, 4, 3),
        (2, 5, 4),
    ]
    assert batch.attention.num_decode == 6
    assert steps.scheduler.advance(schedule).tolist() == [0, 0, 0, 0, 1, 1]
    assert steps.table.num_computed[:2].tolist() == [6, 3]


def test_a_block_that_only_a_refused_draft_has_reached_is_not_read():
    steps = Steps([1, 2, 3, 4, 5, 6, 7])
    steps.step()
    schedule, _ = step_with_drafts(steps, {0: [30, 31]})
    steps.scheduler.advance(schedule)
    steps.table.append_tokens(np.array([0]), np.array([9]))
    # block 2 exists, but the position of this step is in another block
    steps.table.num_computed[0] = 7
    batch = steps.builder.build(steps.scheduler.schedule())
    assert decode(batch) == [(0, 0, 4), (1, 0, 4)]
    assert steps.table.num_blocks[0] == 3


def test_drafts_of_a_group_read_the_shared_prefix_together():
    steps = Steps(np.r_[PREFIX, 1, 2], np.r_[PREFIX, 3, 4], min_tokens=8, max_tokens=9)
    steps.step()
    _, batch = step_with_drafts(steps, {0: [30], 1: [40, 41]})
    assert segments(batch) == [([0, 1, 2, 3, 4], [0, 1], 8, 0)]
    assert batch.positions.tolist() == [10, 11, 10, 11, 12]


def test_drafts_count_as_rows():
    reads = CascadeThresholds(num_rows=(4, 5), min_tokens=(9, 8))
    for drafts, num_shared in (({0: [30], 1: [40]}, 0), ({0: [30], 1: [40, 41]}, 1)):
        steps = Steps(np.r_[PREFIX, 1, 2], np.r_[PREFIX, 3, 4], max_tokens=9)
        steps.builder._plans = PlanBuilder(steps.table, 32, reads=reads)
        steps.step()
        _, batch = step_with_drafts(steps, drafts)
        assert len(segments(batch)) == num_shared


def test_rows_of_a_prompt_follow_those_of_drafts():
    steps = Steps([1, 2, 3, 4, 5])
    steps.step()
    steps.add([8, 9])
    _, batch = step_with_drafts(steps, {0: [30, 31]})
    assert batch.token_ids.tolist() == [7, 30, 31, 8, 9]
    assert batch.logits_idx.tolist() == [0, 1, 2, 4]
    assert (batch.attention.prefill.starts, batch.attention.prefill.lens) == ((3,), (2,))
    # the last layer needs only the last row of the prompt, as a decode row
    assert batch.logits_attention.num_decode == 4


def test_indices_need_one_copy_to_a_device_and_late_tokens_one_more():
    steps = Steps([1, 2, 3, 4, 5], [6, 7])
    steps.step()
    steps.add([8, 9])
    batch = steps.step()
    assert [7, 7, 8, 9] == batch.token_ids.tolist()
    late = LateTokens(np.array([1]), np.array([2]), torch.tensor([40, 41, 42]))
    for wanted, placed, num_copies in (
        ([7, 7, 8, 9], batch, 1),
        ([7, 42, 8, 9], replace(batch, late=late), 2),
    ):
        queue = LazyQueue(runs_at_once=True)
        uploads = IndexUploads(torch.device("cpu"), queue)
        # a batch for another device is copied, here to a CPU
        made = on_device(placed, uploads, torch.device("meta"))
        assert num_copies == len(queue.pending)
        assert wanted == made.token_ids.tolist()
        for name in ("positions", "slot_mapping", "logits_idx"):
            assert torch.equal(getattr(batch, name), getattr(made, name))
