"""Victim orders and page reservations at the page boundary, on a simulated engine.

Run: PYTHONPATH=benchmarks python lab/benchmarks/page_boundary.py [--seeds 5] [--workloads W4,W5]
Every number is simulated (`page_simulator.py`). Device memory holds 5, 20 or 40 % of the pages that
all sequences need at their ends. In the first table rows of a workload, host memory has room for
all sequences, so none is evicted. In the other rows host memory is smaller, down to the size of
device memory, and a sequence that yields may be prefilled again. Cells are medians over seeds;
steps have the worst seed in brackets. The last column compares seed by seed, and gives the range.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import conditions
import numpy as np
from boundary.records import BoundaryOptions, VictimOrder
from host_chunk import AdaptiveHostChunk
from page_simulator import Lengths, Machine, Outcome, simulate
from step_simulator import Device

PAGE_TOKENS = 64
TAIL_SIGMA, TAIL_CLIP = 1.95, 9.2
# published lengths. W4 has a twentieth of the published rows, W5 twice as many; the prompt length
# of W5 is not published
W4_ROWS, W5_ROWS, PROMPT = 1024, 512, 1024
DEVICE_SHARES = (0.05, 0.2, 0.4)
ROOFLINE = Device(token_budget=2048, kv_tokens=0)
# PCIe 5.0 in one direction, less its overhead
LINK_BYTES_PER_S = 50e9


def w4(seed: int, num_rows: int = W4_ROWS) -> Lengths:
    random = np.random.default_rng([4, seed])
    tail = np.exp(random.normal(np.log(200), TAIL_SIGMA, num_rows))
    return knowing_the_largest(np.minimum(tail, TAIL_CLIP * np.quantile(tail, 0.95)))


def w5(seed: int, num_rows: int = W5_ROWS) -> Lengths:
    random = np.random.default_rng([5, seed])
    tail = np.exp(random.normal(np.log(2000), 1.2, num_rows))
    return knowing_the_largest(np.minimum(tail, 65536))


def knowing_the_largest(tail: np.ndarray) -> Lengths:
    """Return lengths whose limits, which the policy sees, are all the largest output drawn."""
    output = np.maximum(np.rint(tail), 1).astype(np.int64)
    return Lengths(
        prompt=np.full(len(output), PROMPT),
        output=output,
        max_tokens=np.full(len(output), int(output.max())),
    )


WORKLOADS: dict[str, Callable[[int], Lengths]] = {"W4": w4, "W5": w5}
VICTIMS: tuple[VictimOrder, ...] = get_args(VictimOrder)
WHOLE_OUTPUT = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of a table.

    Args:
        device: device pages as a share of the pages that all sequences need at their ends.
        host: host pages as a share of the same.
        victims: which sequence yields first.
        reservation: `initial`, `extension` and `interval` of the options.
        chunk: host pages granted ahead: "adaptive", or "none" beyond those of the lookahead.
        knows: output lengths that the policy sees: their limit "max" or, as an oracle, "true".
        refill_ratio: `refill_ratio` of the options.
    """

    device: float
    host: float = 4.0
    victims: VictimOrder = "least"
    reservation: tuple[int, int, int] = (2, 2, 1)
    chunk: str = "none"
    knows: str = "max"
    refill_ratio: float = 0.25

    @property
    def options(self) -> BoundaryOptions:
        initial, extension, interval = self.reservation
        return BoundaryOptions(
            initial=initial,
            extension=extension,
            interval=interval,
            victims=self.victims,
            refill_ratio=self.refill_ratio,
        )

    @property
    def reserves(self) -> str:
        initial, extension, interval = self.reservation
        if initial == WHOLE_OUTPUT:
            return "whole output" if self.knows == "max" else "true output (oracle)"
        return f"{initial}, {extension}, {interval}"


def device_cases() -> Iterator[Case]:
    """Yield cases in which host memory has room for all sequences."""
    for device in DEVICE_SHARES:
        for victims in VICTIMS:
            yield Case(device=device, victims=victims)
        for reservation in ((8, 8, 4), (32, 4, 2)):
            yield Case(device=device, reservation=reservation)
        # at the smallest share only about six sequences run at once, and a run takes hours
        if device != min(DEVICE_SHARES):
            whole = (WHOLE_OUTPUT, 1, 1)
            yield Case(device=device, reservation=whole)
            yield Case(device=device, reservation=whole, knows="true")


def host_cases() -> Iterator[Case]:
    """Yield cases with little host memory.

    Host memory no larger than the device's has no room for sequences that yield.
    """
    device = min(DEVICE_SHARES)
    for host in (1, 2, 4):
        for victims in VICTIMS:
            yield Case(device=device, host=host * device, victims=victims)
        yield Case(device=device, host=host * device, chunk="adaptive")
    for ratio in (0.0, 1.0):
        yield Case(device=device, host=device, refill_ratio=ratio)


def run(lengths: Lengths, case: Case) -> Outcome:
    need = lengths.need_pages(PAGE_TOKENS)
    machine = Machine(
        device_pages=round(case.device * need),
        host_pages=round(case.host * need),
        page_tokens=PAGE_TOKENS,
        max_active=len(lengths.prompt),
        link_bytes_per_s=LINK_BYTES_PER_S,
        roofline=ROOFLINE,
    )
    if case.knows == "true":
        lengths = replace(lengths, max_tokens=lengths.output)
    chunk = AdaptiveHostChunk(page_tokens=PAGE_TOKENS) if case.chunk == "adaptive" else None
    return simulate(lengths, machine, case.options, chunk)


COLUMNS: dict[str, Callable[[Outcome], float]] = {
    "steps": lambda outcome: outcome.steps,
    "steps to 95 %": lambda outcome: outcome.steps_at_95,
    "virtual s": lambda outcome: outcome.seconds,
    "mean active": lambda outcome: outcome.mean_active,
    "suspended": lambda outcome: outcome.suspended,
    "evicted": lambda outcome: outcome.evicted,
    "loaded pages": lambda outcome: outcome.loaded_pages,
    "recomputed tokens": lambda outcome: outcome.recomputed_tokens,
    "rounds": lambda outcome: outcome.rounds,
    "capacity": lambda outcome: outcome.over_capacity,
}
LAST_COLUMNS = ("of bound", "steps against the first row of this memory")


def line(
    name: str, case: Case, runs: list[Outcome], bounds: list[float], first: list[Outcome]
) -> str:
    """Return a row of the table; `first` are the runs of the first case with the same memory."""
    cells = [f"{np.median([get(outcome) for outcome in runs]):.0f}" for get in COLUMNS.values()]
    cells[0] += f" ({max(outcome.steps for outcome in runs)})"
    ratios = [bound / outcome.decode_steps for bound, outcome in zip(bounds, runs, strict=True)]
    against = [one.steps / other.steps - 1 for one, other in zip(runs, first, strict=True)]
    low, middle, high = (f"{np.quantile(against, q):+.0%}" for q in (0, 0.5, 1))
    kind = [name, f"{case.device:.0%}", f"{case.host:.0%}", case.victims, case.reserves]
    cells = [*kind, case.chunk, f"{case.refill_ratio}", *cells, f"{np.median(ratios):.0%}"]
    cells.append(f"{middle} ({low} to {high})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    kinds = ["workload", "device KV", "host KV", "victims", "pages", "chunk", "ratio"]
    table = [f"| {' | '.join([*kinds, *COLUMNS, *LAST_COLUMNS])} |"]
    table.append("|---" * (len(kinds) + len(COLUMNS) + len(LAST_COLUMNS)) + "|")
    print("\n".join(table), flush=True)
    raw: list[dict[str, Any]] = []
    for name in options.workloads.split(","):
        lengths = [WORKLOADS[name](seed) for seed in range(options.seeds)]
        first: dict[tuple[float, float], list[Outcome]] = {}
        for case in (*device_cases(), *host_cases()):
            runs = [run(each, case) for each in lengths]
            same_memory = first.setdefault((case.device, case.host), runs)
            bounds = [
                each.bound_steps(
                    PAGE_TOKENS, round(case.device * each.need_pages(PAGE_TOKENS)), len(each.prompt)
                )
                for each in lengths
            ]
            table.append(line(name, case, runs, bounds, same_memory))
            print(table[-1], flush=True)
            for seed, (outcome, bound) in enumerate(zip(runs, bounds, strict=True)):
                counts = {"bound_steps": round(bound)} | asdict(outcome)
                raw.append({"workload": name, "seed": seed, **asdict(case), **counts})
    what = "simulated: virtual clock on the reference roofline; no run on an engine"
    conditions.write_result(
        options.out, "../lab/benchmarks/page_boundary.py", what=what, table=table, runs=raw
    )


if __name__ == "__main__":
    main()
