"""What steps of the replicas of a pool cost by the lengths of their rows, as it sees them."""

from collections import deque

from raybatch.policy.cost.cost_model import MeasuredStep
from raybatch.records.arrays import Ints
from raybatch.records.types import ReplicaStats
from raybatch_lab.stages.quality import StepQuality, fit_quality

# reports that costs are fitted to, the latest of all replicas; the fewest, and new ones for a fit
_NUM_KEPT, _MIN_KEPT, _NUM_NEW = 256, 24, 24
# of held-out steps on average, beyond which a fit is not used
_MAX_ERROR = 0.2


class ObservedSteps:
    """Fits costs of steps to the counters that replicas report: `note` each report.

    Attributes:
        quality: the fitted costs; None before enough steps were seen, or if the fit is poor.
    """

    def __init__(self) -> None:
        self.quality: StepQuality | None = None
        self._last: dict[int, ReplicaStats] = {}
        self._steps: deque[MeasuredStep] = deque(maxlen=_NUM_KEPT)
        self._num_new = 0

    def note(self, replica_id: int, stats: ReplicaStats, lengths: Ints) -> None:
        """Add a report of a replica: its counters, and the tokens of each row that it runs."""
        before, self._last[replica_id] = self._last.get(replica_id), stats
        if before is None or not len(lengths):
            return
        num_steps = stats.num_steps - before.num_steps
        rows = stats.generated_tokens - before.generated_tokens
        prompts = stats.num_prefilled_tokens - before.num_prefilled_tokens
        seconds = stats.engine_s - before.engine_s
        # counters fall when an engine is rebuilt
        if num_steps <= 0 or seconds <= 0 or min(rows, prompts) < 0:
            return
        step = MeasuredStep(
            seconds=seconds / num_steps,
            tokens=(rows + prompts) / num_steps,
            rows=rows / num_steps,
            context_reads=float(lengths.mean()) * rows / num_steps,
        )
        self._steps.append(step)
        self._num_new += 1
        if len(self._steps) >= _MIN_KEPT and self._num_new >= _NUM_NEW:
            self._num_new = 0
            found = fit_quality(self._steps)
            # on a busy host steps say little, and a plan by them would be worse than one without
            self.quality = found if found.held_out_error <= _MAX_ERROR else None
