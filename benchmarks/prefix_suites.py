"""The suites of the prefix benchmark: workloads, KV sizes, and the sides and orders that run."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prefix_orders import PROMPT_ORDERS, PromptOrder
from prefix_sides import Contestant
from workloads_e2e import Workload
from workloads_prefix import GroupClass

SuiteName = Literal["smoke", "default", "vllm", "pipeline", "pipeline-large", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One workload at one KV size, and the contestants that run it.

    Args:
        workload: prompts and output lengths.
        kv_percent: KV size as a percentage of the workload's shared prefixes.
        contestants: contestants in the order of their turns.
        model: name in `models.SHAPES`.
        repetitions: runs of each contestant; one is enough for the counts of a pool.
        max_batched_tokens: token budget of one step, for every side.
    """

    workload: Workload
    kv_percent: int
    contestants: tuple[Contestant, ...]
    model: str = "dense-4m"
    repetitions: int = 3
    max_batched_tokens: int = 2048


def classes(name: str, *groups: GroupClass) -> Workload:
    """Return a workload of group classes."""
    num_requests = sum(count * members for count, members, *_ in groups)
    return Workload(
        name=name,
        kind="classes",
        num_requests=num_requests,
        prompt_len=0,
        output_len=0,
        classes=groups,
    )


def w1(sharing_degree: int, num_requests: int = 1024) -> Workload:
    """Return W1 in its small form: 256 shared, 32 distinct and 16 output tokens."""
    num_groups = num_requests // sharing_degree
    return classes(f"W1 x{sharing_degree}", (num_groups, sharing_degree, 256, 32, 16))


W1 = w1(16)
W1_LONG = dataclasses.replace(w1(16, 4096), name="W1 x16 long")
W1_16K = dataclasses.replace(w1(16, 16_384), name="W1 x16 16k")
W1_100K = dataclasses.replace(w1(16, 100_000), name="W1 x16 100k")
ZERO = classes("zero share", (256, 1, 0, 288, 16))
W2 = classes("W2", (20, 16, 48, 16, 48), (20, 16, 512, 32, 8))
W10 = Workload(name="W10", kind="trees", num_requests=400, prompt_len=0, output_len=8)
DOCS = classes("docs", (16, 16, 512, 16, 8))
# outputs with a heavy tail, and nothing shared
W4 = Workload(name="W4", kind="tail", num_requests=512, prompt_len=32, output_len=6)
_ALL = (W1, W1_LONG, W1_16K, W1_100K, w1(2), w1(4), w1(64), ZERO, W2, W4, W10, DOCS)
WORKLOADS = {w.name: w for w in _ALL}


def _on(sides: Sequence[str], *orders: PromptOrder, replicas: int = 1) -> tuple[Contestant, ...]:
    return tuple(
        Contestant(side=side, order=order, replicas=replicas) for side in sides for order in orders
    )


PLANNED = _on(["raybatch-plan"], "shuffled")
# the strongest cheap baseline alone, and with the order in which files come
CHEAP = PLANNED + _on(["vllm-compiled"], "sorted")
BRIEF = CHEAP + _on(["vllm-compiled"], "shuffled")
# prefixes of prefixes, for trees
MULTI_LEVEL = _on(["raybatch-multi-plan"], "shuffled")
HEADLINE = (
    PLANNED
    + _on(["raybatch-32-plan"], "shuffled")
    + _on(["raybatch"], "shuffled")
    + _on(["vllm-compiled"], "shuffled", "sorted", "groups")
    + _on(["vllm-eager"], "sorted")
)
EVERY_ENGINE = (
    PLANNED + MULTI_LEVEL + _on(["raybatch", "vllm-compiled", "vllm-eager"], *PROMPT_ORDERS)
)
CONTROL = PLANNED + _on(["raybatch"], "shuffled")
JOBS = _on(["raybatch-job-plan", "raydata-llm"], "shuffled")
EVERY_JOB = (
    _on(["raybatch-job-plan"], "shuffled")
    + _on(["raybatch-job"], "shuffled", "sorted")
    + _on(["raydata-llm"], *PROMPT_ORDERS)
)
# the same engine on all sides, which shows the gain and the cost of raybatch's plan and pool
SAME_ENGINE = _on(["raybatch-vllm-plan"], "shuffled") + _on(
    ["raybatch-vllm", "vllm-compiled"], "shuffled", "sorted"
)
SAME_ENGINE_CONTROL = _on(["raybatch-vllm-plan", "raybatch-vllm", "vllm-compiled"], "shuffled")
SAME_ENGINE_JOBS = (
    _on(["raybatch-vllm-job-plan"], "shuffled")
    + _on(["raydata-llm"], "shuffled", "sorted")
    + _on(["raydata-llm-default"], "shuffled")
)
SAME_ENGINE_PIPELINES = _on(["raybatch-vllm-pipeline-plan"], "shuffled") + _on(
    ["raydata-llm"], "shuffled", "sorted"
)
PIPELINES = SAME_ENGINE_PIPELINES + _on(["raybatch-vllm-pipeline"], "shuffled")
SAME_ENGINE_PAIRS = _on(["raybatch-vllm-job-plan"], "shuffled", replicas=2) + _on(
    ["raydata-llm"], "shuffled", "sorted", replicas=2
)
SAME_ENGINE_CONTROL_JOBS = _on(
    ["raybatch-vllm-job-plan", "raybatch-vllm-job", "raydata-llm"], "shuffled"
)
REPLICAS = (1, 2, 4)


def pools(*replicas: int) -> tuple[Contestant, ...]:
    """Return pools with a plan in shuffled order, and without one on sorted prompts."""
    return tuple(
        contestant
        for count in replicas
        for contestant in (
            *_on(["raybatch-pool-plan"], "shuffled", replicas=count),
            *_on(["raybatch-pool"], "sorted", replicas=count),
        )
    )


def split_jobs(*replicas: int) -> tuple[Contestant, ...]:
    """Return jobs of several replicas: planned, and `ray.data.llm` on sorted prompts."""
    return tuple(
        contestant
        for count in replicas
        for contestant in (
            *_on(["raybatch-job-plan"], "shuffled", replicas=count),
            *_on(["raydata-llm"], "sorted", replicas=count),
        )
    )


def _trial(
    workload: Workload, kv_percent: int, contestants: tuple[Contestant, ...], repetitions: int = 3
) -> Trial:
    return Trial(
        workload=workload,
        kv_percent=kv_percent,
        contestants=contestants,
        repetitions=repetitions,
        max_batched_tokens=256 if workload is W2 else 2048,
    )


SUITES: dict[SuiteName, tuple[Trial, ...]] = {
    "smoke": (_trial(w1(16, 128), 25, BRIEF, 1), _trial(w1(16, 128), 25, pools(2), 1)),
    "default": (
        _trial(W1, 25, HEADLINE),
        _trial(W1, 50, CHEAP),
        _trial(W1, 150, BRIEF),
        _trial(W2, 25, BRIEF),
        _trial(W10, 25, MULTI_LEVEL + CHEAP),
        _trial(DOCS, 25, BRIEF),
        _trial(ZERO, 25, CONTROL, 5),
        _trial(W1, 25, pools(2, 4), 1),
        _trial(W1, 25, JOBS),
        _trial(DOCS, 25, JOBS),
        _trial(W1, 25, _on(["raydata-llm"], "sorted"), 1),
    ),
    "vllm": (
        _trial(W1, 25, SAME_ENGINE),
        _trial(DOCS, 25, SAME_ENGINE),
        _trial(ZERO, 25, SAME_ENGINE_CONTROL, 5),
        _trial(W4, 400, SAME_ENGINE_CONTROL),
        _trial(W1, 25, SAME_ENGINE_JOBS + SAME_ENGINE_PAIRS),
        _trial(DOCS, 25, SAME_ENGINE_JOBS),
        _trial(ZERO, 25, SAME_ENGINE_CONTROL_JOBS),
        _trial(W4, 400, SAME_ENGINE_JOBS + SAME_ENGINE_PAIRS),
    ),
    "pipeline": (_trial(W1, 25, PIPELINES), _trial(W1_LONG, 25, SAME_ENGINE_PIPELINES)),
    "pipeline-large": (_trial(W1_16K, 25, PIPELINES, 1), _trial(W1_100K, 25, PIPELINES, 1)),
    "full": (
        *(
            _trial(workload, kv_percent, EVERY_ENGINE)
            for workload in (W1, w1(2), w1(4), w1(64), W2, W10, DOCS)
            for kv_percent in (25, 50, 150)
        ),
        _trial(ZERO, 25, CONTROL + _on(["vllm-compiled", "vllm-eager"], "shuffled"), 5),
        *(_trial(workload, 25, pools(*REPLICAS), 1) for workload in (W1, w1(64), W10)),
        *(_trial(workload, 25, EVERY_JOB) for workload in (W1, DOCS)),
        *(_trial(workload, 25, split_jobs(2, 4), 1) for workload in (W1, w1(64))),
    ),
}


def chosen(
    suite: SuiteName,
    *,
    models: Sequence[str] = (),
    workloads: Sequence[str] = (),
    kv_percents: Sequence[int] = (),
    sides: Sequence[str] = (),
    orders: Sequence[str] = (),
    repetitions: int | None = None,
) -> list[Trial]:
    """Return the trials of a suite that match the arguments; an empty argument matches all.

    KV sizes and workloads that the suite lacks are run by the contestants of its first trial. Other
    models run all its trials.
    """
    trials = list(SUITES[suite])
    missing = [name for name in workloads if all(t.workload.name != name for t in trials)]
    trials += [_trial(WORKLOADS[name], 25, trials[0].contestants) for name in missing]
    if workloads:
        trials = [t for t in trials if t.workload.name in workloads]
    if kv_percents:
        first = {t.workload.name: t for t in reversed(trials)}
        there = {(t.workload.name, t.kv_percent) for t in trials}
        trials = [t for t in trials if t.kv_percent in kv_percents] + [
            dataclasses.replace(first[name], kv_percent=percent)
            for name in first
            for percent in kv_percents
            if (name, percent) not in there
        ]
    narrowed = []
    for trial in trials:
        contestants = tuple(
            c
            for c in trial.contestants
            if (not sides or c.side in sides) and (not orders or c.order in orders)
        )
        if contestants:
            times = repetitions or trial.repetitions
            narrowed.append(dataclasses.replace(trial, contestants=contestants, repetitions=times))
    return [
        dataclasses.replace(trial, model=model)
        for model in (models or ["dense-4m"])
        for trial in narrowed
    ]
