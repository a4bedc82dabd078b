"""What the scheduler decided for one step, and its counters."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences import Sequence

__all__ = ["Schedule", "SchedulerCounters"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One step: a token for each decoding slot, and chunks of prompts.

    Args:
        decode_slots: int64 [D], ascending.
        chunk_slots: int64 [C], started prompts first, then new ones in order of submission.
        chunk_starts: int64 [C], first position of each chunk.
        chunk_lens: int64 [C], tokens of each chunk, at least 1.
        admitted: slots filled for this step.
        preempted: slots emptied for this step.
        ended: sequences that cannot fit even alone.
    """

    decode_slots: Int64s
    chunk_slots: Int64s
    chunk_starts: Int64s
    chunk_lens: Int64s
    admitted: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    ended: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward batch."""
        return len(self.decode_slots) + int(self.chunk_lens.sum())


@dataclass(kw_only=True, slots=True)
class SchedulerCounters:
    """Tokens and events since the start; meanings as in `raybatch.types.ReplicaStats`."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_held_steps: int = 0
