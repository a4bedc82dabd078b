"""One line on how an engine would run the rows of a plan; without torch where it can be told."""

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

from raybatch.actors.executors.local_pools import gpus_of_host
from raybatch.backends.registry import type_of
from raybatch.errors import CapacityError, ConfigError
from raybatch.explanation.question import Question, placement_of
from raybatch.explanation.record import Explanation
from raybatch.policy.choose_engine import EngineFacts, choose_engine
from raybatch.policy.cost.work import WorkTotals, output_sample
from raybatch.policy.layer_plan import RowsAhead, RowShape
from raybatch.policy.memory_budget import MemoryBudget
from raybatch.rows.stage_model import find_model

# that stand for all output lengths
_NUM_LENGTHS = 64


def engine_text(
    question: Question, explanation: Explanation, work: Callable[[], WorkTotals]
) -> str:
    """Return how engines run these rows, and why; "" where engines choose nothing.

    Layers are measured by an engine or by `raybatch bench plan`, and read here. `work` is called
    where they were.
    """
    spec = question.spec
    if not type_of(spec.backend).chooses_way or not explanation.profile.num_generated:
        return ""
    engine = spec.engine
    is_gpu = engine.device != "cpu" and gpus_of_host() > 0
    budget = MemoryBudget.resolve(engine, is_gpu=is_gpu)
    if not is_gpu and not budget.may_choose:
        return budget.plain_reason()
    later = (
        "is chosen when an engine has measured its layers; "
        f"`raybatch bench plan {spec.model}` measures them now"
    )
    folder = find_model(question.job.config)
    if find_spec("torch") is None or folder is None:
        return later
    from raybatch.engine.loading.prepared import known_budget  # torch is slow to load

    placement = placement_of(question)
    try:
        known, profile = known_budget(
            folder, engine, num_engines_on_host=placement.num_engines_on_host
        )
        if not known.may_choose:
            return known.plain_reason()
        if profile is None:
            return later
        lengths = (explanation.profile.prompt_tokens, explanation.profile.output_tokens)
        longest = sum(length.highest for length in lengths)
        rows = rows_of(work(), placement.num_replicas, longest)
        choice = choose_engine(EngineFacts.of(known, profile.model, profile.costs(), rows))
    except (ConfigError, CapacityError):
        # said where engines start
        return later
    return "; ".join((choice.reason, *choice.notes()))


def rows_of(work: WorkTotals, num_replicas: int, longest_tokens: float) -> RowsAhead:
    """Return the rows of a plan as one of its engines gets them."""
    num_rows, outputs = work.num_rows, np.array(work.output_lengths)
    prompt_tokens = read_tokens = work.computed_tokens / num_rows
    if (decodes := work.generated_tokens - num_rows) > 0:
        # of what decodes read, all but what their rows have generated
        own = num_rows * float((outputs * (outputs - 1) / 2).mean())
        read_tokens = (work.context_reads + work.shared_pairs - own) / decodes
    lengths = output_sample(outputs, _NUM_LENGTHS)
    return RowsAhead(
        shape=RowShape(
            prompt_tokens=max(1, round(prompt_tokens)),
            output_tokens=max(1, round(work.generated_tokens / num_rows)),
        ),
        num_rows=-(-num_rows // num_replicas),
        output_lengths=lengths if lengths[0] < lengths[-1] else (),
        longest_tokens=int(longest_tokens),
        prompt_reads=(work.pairs + work.past_pairs) / max(1.0, work.computed_tokens),
        shared_tokens=max(0.0, read_tokens - prompt_tokens),
        group_rows=work.shared_pairs / work.shared_reads if work.shared_reads else 1.0,
    )
