"""Simulates an engine that stops at page boundaries: counts of pages and tokens, a virtual clock.

`boundary.page_boundary` makes the plans and `apply_plan` applies them. Between two boundaries every
active sequence decodes until the boundary or its end, and the slot of an ended sequence stays empty
until the boundary. A prefill round computes its prompts in steps of a token budget while nothing
decodes. Pages are loaded while the next interval is computed, so a load costs only the time by
which it exceeds the interval. The time of a step is the roofline of `step_simulator.Device`. Only
`plan_cpu_s` is measured.
"""

import time
from dataclasses import dataclass, replace

import numpy as np
from boundary.page_boundary import plan_boundary
from boundary.records import BoundaryOptions, BoundarySnapshot, SequencePages, apply_plan
from host_chunk import AdaptiveHostChunk
from step_simulator import Device

from raybatch.records.arrays import Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths of sequences that all wait from the beginning; int64 [S].

    Args:
        prompt: tokens to prefill.
        output: tokens that each sequence generates, at least 1, which the policy does not see.
        max_tokens: limit of each output in tokens, which the policy sees.
    """

    prompt: Ints
    output: Ints
    max_tokens: Ints

    def need_pages(self, page_tokens: int) -> int:
        """Return the pages of all sequences at their ends together."""
        return int((-(-(self.prompt + self.output) // page_tokens)).sum())

    def bound_steps(self, page_tokens: int, device_pages: int, max_active: int) -> float:
        """Return the fewest decode steps of any order: by longest output, slots, or memory."""
        page_steps = 0
        for prompt, output in zip(self.prompt.tolist(), self.output.tolist(), strict=True):
            page_steps += int((-(-(prompt + np.arange(output)) // page_tokens)).sum())
        slots = int(self.output.sum()) / max_active
        return max(float(self.output.max()), slots, page_steps / device_pages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Memories and speeds.

    Args:
        device_pages: pages of KV cache on the device.
        host_pages: pages of KV cache in host memory.
        page_tokens: tokens of one page.
        max_active: most sequences of a step.
        link_bytes_per_s: bandwidth from host memory to the device.
        roofline: time of a step; its token budget is that of prefill steps.
    """

    device_pages: int
    host_pages: int
    page_tokens: int
    max_active: int
    link_bytes_per_s: float
    roofline: Device


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Counters of a run, in sums over its boundaries.

    Args:
        decode_steps: steps in which at least one sequence decoded.
        prefill_steps: steps of the token budget that computed prompts.
        decoded_tokens: one per active sequence and step.
        prefilled_tokens: tokens computed in prefill rounds, recomputed ones included.
        recomputed_tokens: prefilled tokens whose KV had been computed before.
        suspended: times that a sequence gave up its device pages for lack of pages.
        evicted: times that a sequence gave up all its pages.
        loaded_pages: pages with KV that were loaded from host memory.
        rounds: prefill rounds.
        boundaries: page boundaries.
        over_capacity: sequences that ended for lack of memory.
        steps_at_95: prefill and decode steps when 95 % of the sequences had ended.
        seconds: virtual seconds.
        plan_cpu_s: CPU seconds of the policy, measured.
    """

    decode_steps: int = 0
    prefill_steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    suspended: int = 0
    evicted: int = 0
    loaded_pages: int = 0
    rounds: int = 0
    boundaries: int = 0
    over_capacity: int = 0
    steps_at_95: int = 0
    seconds: float = 0.0
    plan_cpu_s: float = 0.0

    @property
    def steps(self) -> int:
        return self.decode_steps + self.prefill_steps

    @property
    def mean_active(self) -> float:
        return self.decoded_tokens / max(1, self.decode_steps)


def simulate(
    lengths: Lengths,
    machine: Machine,
    options: BoundaryOptions,
    chunk: AdaptiveHostChunk | None = None,
) -> Outcome:
    """Run all sequences to their ends; without a chunk, host pages are granted as they are used."""
    outcome = Outcome()
    outputs = lengths.output.tolist()
    columns = (lengths.prompt.tolist(), lengths.max_tokens.tolist())
    sequences = tuple(
        SequencePages(id=id, status="waiting", context_tokens=prompt, remaining_tokens=budget)
        for id, (prompt, budget) in enumerate(zip(*columns, strict=True))
    )
    snapshot = BoundarySnapshot(
        sequences=sequences,
        page_tokens=machine.page_tokens,
        device_pages=machine.device_pages,
        device_free=machine.device_pages,
        host_pages=machine.host_pages,
        host_free=machine.host_pages,
        max_active=machine.max_active,
    )
    at_95 = len(sequences) - round(0.95 * len(sequences))
    seen: set[int] = set()
    while snapshot.sequences:
        if chunk is not None:
            snapshot = replace(snapshot, host_chunk_tokens=chunk.tokens)
        begin_s = time.process_time()
        plan = plan_boundary(snapshot, options)
        outcome.plan_cpu_s += time.process_time() - begin_s
        after = apply_plan(snapshot, plan)
        if chunk is not None:
            for id in plan.release:
                chunk.observe(outputs[id])
        if len(snapshot.sequences) > at_95 >= len(after.sequences):
            outcome.steps_at_95 = outcome.steps
        outcome.boundaries += 1
        outcome.evicted += len(plan.evict)
        outcome.over_capacity += len(plan.over_capacity)
        if plan.is_prefill:
            chosen = {grant.id for grant in plan.prefill}
            prompts = {s.id: s.context_tokens for s in after.sequences if s.id in chosen}
            outcome.recomputed_tokens += sum(n for id, n in prompts.items() if id in seen)
            seen |= chosen
            _prefill(np.array(list(prompts.values())), machine, outcome)
            snapshot = _aged(replace(after, boundaries_since_prefill=0), snapshot)
            continue
        outcome.suspended += len(plan.suspend)
        num_before = outcome.decode_steps
        decoded = _decode(after, outputs, machine, options, outcome)
        loaded = {grant.id for grant in plan.load}
        context = [s.context_tokens for s in after.sequences if s.id in loaded]
        pages = sum(after.pages(tokens) for tokens in context)
        _count_load(pages, outcome.decode_steps - num_before, decoded, machine, outcome)
        since = after.boundaries_since_prefill + 1
        ahead = replace(after, boundaries_since_prefill=since)
        snapshot = _aged(_grown(ahead, decoded, outputs), snapshot)
    return outcome


def _decode(
    after: BoundarySnapshot,
    outputs: list[int],
    machine: Machine,
    options: BoundaryOptions,
    outcome: Outcome,
) -> dict[int, int]:
    """Return the tokens of each active sequence until the next boundary; count their steps."""
    interval = options.interval * machine.page_tokens
    decoded, contexts = {}, []
    for sequence in after.sequences:
        if sequence.status == "active":
            pages = min(sequence.device_pages, sequence.host_pages)
            room = pages * machine.page_tokens - sequence.context_tokens
            left = outputs[sequence.id] - sequence.progress_tokens
            decoded[sequence.id] = min(interval, room, left)
            contexts.append(sequence.context_tokens)
    if not decoded:
        return decoded
    tokens, context = np.array(list(decoded.values())), np.array(contexts)
    steps = np.arange(int(tokens.max()))
    is_on = tokens[:, None] > steps
    batch = is_on.sum(0)
    reads = (is_on * (context[:, None] + steps)).sum(0)
    roofline = machine.roofline
    compute_s = np.array([roofline.compute_s(n, c) for n, c in zip(batch, reads, strict=True)])
    memory_s = roofline.weights_s + np.array([roofline.read_s(c) for c in reads])
    outcome.seconds += float((roofline.fixed_s + np.maximum(compute_s, memory_s)).sum())
    outcome.decode_steps += len(steps)
    outcome.decoded_tokens += int(tokens.sum())
    return decoded


def _count_load(
    pages: int, steps: int, decoded: dict[int, int], machine: Machine, outcome: Outcome
) -> None:
    """Count loaded pages, and the time of their transfer that the interval did not hide."""
    outcome.loaded_pages += pages
    page_bytes = machine.page_tokens * machine.roofline.kv_bytes
    hidden_s = steps * (machine.roofline.fixed_s + machine.roofline.weights_s)
    outcome.seconds += max(0.0, pages * page_bytes / machine.link_bytes_per_s - hidden_s)


def _prefill(prompts: Ints, machine: Machine, outcome: Outcome) -> None:
    roofline = machine.roofline
    tokens, pairs = int(prompts.sum()), float((prompts**2).sum()) / 2
    steps = -(-tokens // roofline.token_budget)
    outcome.rounds += 1
    outcome.prefill_steps += steps
    outcome.prefilled_tokens += tokens
    busy_s = max(roofline.compute_s(tokens, pairs), steps * roofline.weights_s)
    outcome.seconds += steps * roofline.fixed_s + busy_s


def _grown(
    after: BoundarySnapshot, decoded: dict[int, int], outputs: list[int]
) -> BoundarySnapshot:
    sequences = []
    for sequence in after.sequences:
        tokens = decoded.get(sequence.id)
        if tokens is not None:
            progress = sequence.progress_tokens + tokens
            has_ended = progress == outputs[sequence.id]
            sequence = replace(
                sequence,
                context_tokens=sequence.context_tokens + tokens,
                progress_tokens=progress,
                remaining_tokens=0 if has_ended else sequence.remaining_tokens - tokens,
            )
        sequences.append(sequence)
    return replace(after, sequences=tuple(sequences))


def _aged(after: BoundarySnapshot, before: BoundarySnapshot) -> BoundarySnapshot:
    """Count a boundary of waiting for each sequence that is not active and kept its status."""
    status = {sequence.id: sequence.status for sequence in before.sequences}
    return replace(
        after,
        sequences=tuple(
            sequence
            if sequence.status == "active" or sequence.status != status[sequence.id]
            else replace(sequence, waited=sequence.waited + 1)
            for sequence in after.sequences
        ),
    )
