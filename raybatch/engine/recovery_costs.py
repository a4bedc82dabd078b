"""Whether a preempted sequence should copy its KV or compute it again, from measured times.

Both ways lead to the same tokens, so a clock decides about nothing but time.
"""

from collections import deque

import numpy as np

from raybatch.config import EngineConfig
from raybatch.engine.protocols import Runner
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable
from raybatch.policy.cost.cost_model import CostModel, EngineLimits, MeasuredStep, fit
from raybatch.policy.cost.roofline import Roofline, link
from raybatch.policy.recovery import choose_recovery, recompute_time

# steps of each kind that costs are fitted to, and steps after which they are fitted afresh
_NUM_STEPS, _REFIT_STEPS = 128, 64


class LearnedRecovery:
    """Learns from the steps of an engine what its tokens cost.

    Args:
        link: cost of copies between device and host.
        limits: of the engine.
    """

    def __init__(self, link: Roofline, limits: EngineLimits) -> None:
        self._link = link
        self._limits = limits
        # apart, because long decoding would push out all that tells what prompts cost
        self._prefills: deque[MeasuredStep] = deque(maxlen=_NUM_STEPS)
        self._decodes: deque[MeasuredStep] = deque(maxlen=_NUM_STEPS)
        self._num_new = 0
        self._costs: CostModel | None = None

    def note(self, schedule: Schedule, table: SequenceTable, seconds: float) -> None:
        """Learn from a step that has run, and whose tokens are in the table."""
        starts, lens = schedule.chunk_starts, schedule.chunk_lens
        step = MeasuredStep(
            seconds=seconds,
            tokens=schedule.num_tokens,
            rows=len(schedule.decode_slots),
            pairs=float((lens * (starts + (lens + 1) / 2)).sum()),
            context_reads=float(table.num_computed[schedule.decode_slots].sum()),
        )
        if np.isfinite(seconds) and seconds > 0:
            (self._prefills if len(lens) else self._decodes).append(step)
            self._num_new += 1

    def is_copy_quicker(self, *, num_bytes: int, num_tokens: int, num_shared_tokens: int) -> bool:
        """Return whether copying takes no longer than computing, as `RecoveryChoice` says."""
        if self._num_new >= _REFIT_STEPS or (self._costs is None and self._num_new):
            steps = [*self._prefills, *self._decodes]
            self._costs, self._num_new = fit(steps, self._limits), 0
        if self._costs is None:
            return True
        whole_s, shared_s = (
            recompute_time(self._costs, n) for n in (num_tokens, num_shared_tokens)
        )
        found = choose_recovery(
            kv_bytes=num_bytes, link=self._link, recompute_s=max(0.0, whole_s - shared_s)
        )
        return found.way == "transfer"


def learned_recovery(runner: Runner, config: EngineConfig) -> LearnedRecovery | None:
    """Measure the copies of an idle runner; None where there is no host memory for KV."""
    if not runner.num_host_blocks:
        return None
    limits = EngineLimits(
        kv_tokens=runner.num_blocks * config.block_size_tokens,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size_tokens,
        max_batched_tokens=config.max_batched_tokens,
    )
    return LearnedRecovery(link(runner.copy_bytes_per_s()), limits)
