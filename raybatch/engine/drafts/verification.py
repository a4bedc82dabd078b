"""Which rows of a step count: drafts that equal what was drawn before them, in order."""

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences.schedule import Schedule

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def accepted_rows(schedule: Schedule, token_ids: Int64s) -> list[Int64s]:
    """Return the rows whose tokens go on a sequence, as rounds with a row per slot at most.

    The first round has the rows that a step without drafts has. A later one has those that were
    computed with a draft as their input which is the token drawn in the round before.

    Args:
        schedule: of the step.
        token_ids: int64 [S], drawn for each row with logits.
    """
    lens = schedule.decode_lens
    num_decode_rows = int(lens.sum())
    first_rows = np.cumsum(lens) - lens
    rounds = [np.concatenate((first_rows, np.arange(num_decode_rows, len(token_ids))))]
    if not len(schedule.draft_lens):
        return rounds
    drafts = np.zeros(num_decode_rows, np.int64)
    drafts[schedule.draft_places > 0] = schedule.draft_tokens
    rows, left = first_rows, schedule.draft_lens
    while len(rows):
        has_next = left > 0
        rows, left = rows[has_next] + 1, left[has_next] - 1
        is_right = drafts[rows] == token_ids[rows - 1]
        rows, left = rows[is_right], left[is_right]
        if len(rows):
            rounds.append(rows)
    return rounds


def slots_to_restart(schedule: Schedule, is_finite: Bools) -> Int64s:
    """Return the slots with drafts of which a row has no finite logits.

    A draft that the model cannot stand spoils KV which other rows of its sequence read with weight
    0, and 0 times NaN is NaN. So such a sequence is computed again, without drafts.

    Args:
        schedule: of the step.
        is_finite: bool [S], of each row with logits.
    """
    if not len(schedule.draft_lens) or is_finite.all():
        return np.empty(0, np.int64)
    lens = schedule.decode_lens
    is_spoilt = np.logical_or.reduceat(~is_finite[: lens.sum()], np.cumsum(lens) - lens)
    return schedule.decode_slots[is_spoilt & (schedule.draft_lens > 0)]
