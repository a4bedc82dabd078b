"""Cost models: measured when a backend is first used on a kind of host, then read from disk.

A short program of random prompts is run, and adapts to the backend: what would take too long is
left out, the least important last. Whoever calls runs the backend in its own process;
`raybatch.actors.executors.ray_measure` does it where a replica would run.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from raybatch.backends.base import Backend
from raybatch.backends.registry import create_backend, type_of
from raybatch.config import BackendConfig, EngineConfig
from raybatch.engine.profile.cached_file import (
    cached_path,
    cpu_name,
    read_cached,
    versions,
    write_cached,
)
from raybatch.errors import MeasureError, error_text
from raybatch.models.source import plain_name, without_content
from raybatch.policy.cost.cost_model import CostModel, EngineLimits, MeasuredStep, fit, prompt_pairs
from raybatch.records.types import NO_TOKENS, Request, Sampling, TokenIds

# beyond the start: the program takes about 10 s, and longer only for models that are very slow
MEASURE_S = 300.0
NO_SPEED_OF_ENDPOINTS = "the speed of an endpoint is not measured: every request may cost money"

# of the time by the clock that an engine on a quiet host spends computing
QUIET_SHARE = 0.85
_GPU_INFO = "driver/nvidia/gpus/*/information"

# every model has so many; whether they mean anything does not matter
MIN_VOCAB_SIZE = 128
_PREFILL_LENS = (16, 64, 256, 1024, 4096)
_SHORT_PROMPT_LEN = 64
# prompts with a beginning that is cached, and what each has of its own
_CACHED_PROMPTS = [32] * 8
_DECODE_ROWS = (1, 4, 16, 64)
_MORE_DECODE_ROWS = (8, 32, 256, 1024)
_SHORT_LEN = 8
# sequences and their lengths, of which the first possible ones are measured: a large batch if it
# can have a context worth the name
_CONTEXTS = ((64, 512), (64, 256), (16, 512), (16, 256), (16, 192), (16, 128), (16, 64))
_MORE_CONTEXTS = ((16, 128),)
_SHARED_ROWS = (32, 8)
_SHARED_LENS = (1024, 512, 256, 128, 64)
_NUM_REPEATS = 3
_NUM_DECODE_STEPS = 5
_MAX_IDLE_POLLS = 64
# of the time budget: for one batch of the program, and for doing it again
_MAX_SHARE = 0.3
_MAX_REPEAT_SHARE = 0.03
# of the time that is left, for a batch that others of the same weight follow
_MORE_TO_COME = 0.5

_logger = logging.getLogger(__name__)


def load_or_measure(
    model: str,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    folder: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
    create: Callable[..., Backend] = create_backend,
) -> CostModel:
    """Return the cost model of a backend on this host, measured if there is none yet.

    Measuring loads the model and takes about 10 s more; a message says so. Where an engine on a CPU
    got much less of it than the time by the clock, others were using it, and what was measured is
    used once and not kept. Raises MeasureError where the backend cannot be started or measured.
    """
    path = cost_model_path(
        model, backend, engine, num_engines_on_host=num_engines_on_host, folder=folder
    )
    if (cached := load_cost_model(path)) is not None:
        return cached
    _logger.info("measuring what a step of %s costs here; this happens once", model)
    began = clock()
    try:
        # a draft is one row more of a step, so that a cost of rows is all there is to know of them
        plain = replace(engine, speculative_tokens=None)
        running = create(model, backend, plain, num_engines_on_host=num_engines_on_host)
        loaded, cpu_before = clock(), cpu_clock()
        with closing(running):
            budget = engine.token_budget if type_of(backend).has_weights else None
            limits = limits_of(running, budget)
            steps = measure_backend(running, limits, clock=clock, vocab_size=_vocab_size(model))
        measured = replace(fit(steps, limits), start_s=loaded - began)
    except MeasureError:
        raise
    except Exception as error:
        raise MeasureError(f"{model} could not be measured: {error_text(error)}") from error
    took_s, cpu_s = clock() - loaded, cpu_clock() - cpu_before
    _logger.info(
        "measured in %.1f s after %.1f s of loading, with a fit error of %.0f %%",
        took_s,
        loaded - began,
        100 * measured.fit_error,
    )
    is_on_cpu = type_of(backend).has_weights and (engine.device == "cpu" or not _gpu_names())
    if not is_on_cpu or _was_quiet(took_s, cpu_s):
        write_cached(measured, path, what="cost model")
    return measured


def _was_quiet(took_s: float, cpu_s: float) -> bool:
    """Return whether an engine had its CPU for itself while it was measured; warn if not."""
    if cpu_s >= QUIET_SHARE * took_s:
        return True
    _logger.warning(
        "the host is busy: the engine got %.0f %% of a CPU while it was measured; its times are "
        "too long, and are measured again next time",
        100 * cpu_s / took_s,
    )
    return False


def cost_model_path(
    model: str,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    folder: Path | None = None,
) -> Path:
    """Return the file of a cost model of this host; its name is a hash of all it depends on."""
    described = {
        "model": _model_identity(model),
        "backend": {"kind": backend.kind, "options": dict(backend.options)},
        "engine": asdict(replace(engine, speculative_tokens=None)),
        # engines share the memory of a host where nobody has said how much each gets
        "num_engines_on_host": num_engines_on_host if engine.kv_cache_bytes is None else None,
        "host": {"cpu": cpu_name(), "gpus": [] if engine.device == "cpu" else _gpu_names()},
        "versions": versions(type_of(backend).packages),
    }
    return cached_path("cost-models", described, folder)


def load_cost_model(path: Path) -> CostModel | None:
    """Read a cost model; None if there is none, or a broken one, which is warned about."""
    return read_cached(CostModel, path, what="cost model")


def _model_identity(model: str) -> str:
    """Return what two checkpoints of equal speed have in common, wherever they lie."""
    folder = Path(without_content(model)).expanduser()
    config = folder / "config.json"
    if not config.is_file():
        return plain_name(model)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return f"{hashlib.sha256(config.read_bytes()).hexdigest()}-{num_bytes}"


def _vocab_size(model: str) -> int:
    """Return the size of a local model's vocabulary, else what every model has."""
    try:
        config = Path(without_content(model)).expanduser() / "config.json"
        fields = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return MIN_VOCAB_SIZE
    return int(fields.get("vocab_size", MIN_VOCAB_SIZE))


def _gpu_names() -> list[str]:
    names = []
    for path in sorted(Path("/proc").glob(_GPU_INFO)):
        lines = path.read_text(encoding="utf-8").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return names


def limits_of(backend: Backend, max_batched_tokens: int | None) -> EngineLimits:
    """Return what bounds the batches of a backend."""
    capacity = backend.capacity()
    return EngineLimits(
        kv_tokens=capacity.kv_tokens,
        max_num_seqs=capacity.max_num_seqs,
        block_size=capacity.block_size,
        max_batched_tokens=capacity.max_batched_tokens or max_batched_tokens,
    )


def measure_backend(
    backend: Backend,
    limits: EngineLimits,
    *,
    clock: Callable[[], float],
    budget_s: float = 12.0,
    vocab_size: int = MIN_VOCAB_SIZE,
    seed: int = 0,
) -> list[MeasuredStep]:
    """Run prompts of several lengths and batches of several sizes; return the steps measured.

    The backend must be idle, and is idle afterwards; its counters go on counting. The program takes
    `budget_s`, about; a slow model gets a shorter one. Raises MeasureError where the backend fails
    a prompt, does not come to an end, or is too small.
    """
    driver = _Driver(backend, clock, vocab_size, np.random.default_rng(seed))
    max_len = backend.capacity().max_model_len
    return _Program(driver, limits, clock, max_len, budget_s, end_s=clock() + budget_s).run()


@dataclass(eq=False)
class _Program:
    driver: "_Driver"
    limits: EngineLimits
    clock: Callable[[], float]
    max_len: int
    budget_s: float
    end_s: float
    # seconds per prompt token, and per decode step, of the last and largest step
    token_s: float = 0.0
    decode_s: float = 0.0
    steps: list[MeasuredStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = self.limits.max_batched_tokens or self.limits.kv_tokens
        self.max_prompt = min(self.max_len - 2 * _NUM_DECODE_STEPS, self.limits.kv_tokens - 1)

    def run(self) -> list[MeasuredStep]:
        length = min(_PREFILL_LENS[0], self.max_prompt)
        if length < 1:
            raise MeasureError(f"the backend's limit of {self.max_len} tokens is too small")
        # the first one warms up
        self.driver.prefill([length])
        self.token_s = self.driver.prefill([length]) / length
        self._measure_prefills()
        self._measure_decodes(_DECODE_ROWS)
        self._decode_first(_CONTEXTS, _MORE_TO_COME)
        self._measure_shared()
        self._measure_cached()
        self._decode_first(_MORE_CONTEXTS, _MORE_TO_COME)
        self._measure_decodes(_MORE_DECODE_ROWS)
        return self.steps

    def _measure_prefills(self) -> None:
        limit = min(self.max_prompt, self.budget, self.limits.kv_tokens // 2)
        lengths = [n for n in _PREFILL_LENS if n <= limit]
        for length in lengths or [limit]:
            if self.steps and not self._is_affordable(length * self.token_s):
                break
            self._prefill([length])
        # as many tokens in short prompts: less attention, and a first token for each
        num_prompts = min(int(self.steps[-1].tokens) // _SHORT_PROMPT_LEN, self.limits.max_num_seqs)
        lengths = [_SHORT_PROMPT_LEN] * num_prompts
        if num_prompts > 1 and self._is_affordable(sum(lengths) * self.token_s):
            self._prefill(lengths)

    def _measure_decodes(self, sizes: Sequence[int]) -> None:
        for num_rows in sizes:
            self._decode_first([(num_rows, _SHORT_LEN)])

    def _measure_shared(self) -> None:
        lengths = [n for n in _SHARED_LENS if n % self.limits.block_size == 0]
        # two sizes of a group tell what is read once from what is read by each
        for num_rows, share in zip(_SHARED_ROWS, (_MORE_TO_COME, 1.0), strict=True):
            self._decode_first([(num_rows, _SHORT_LEN, length) for length in lengths], share)

    def _decode_first(self, batches: Sequence[tuple[int, ...]], share: float = 1.0) -> None:
        """Measure the first possible one of some batches: rows, own tokens and shared ones."""
        for batch in batches:
            if self._is_possible(*batch, share=share):
                self._decode(*batch)
                return

    def _measure_cached(self) -> None:
        lengths, limits = _CACHED_PROMPTS, self.limits
        own = sum(-(-n // limits.block_size) for n in lengths) * limits.block_size
        for length in (n for n in _SHARED_LENS if n % limits.block_size == 0):
            fits = length + own <= limits.kv_tokens and length + lengths[0] < self.max_prompt
            is_small = len(lengths) <= limits.max_num_seqs and sum(lengths) <= self.budget
            if fits and is_small and self._is_affordable((length + own) * self.token_s):
                self._prefill(lengths, self.driver.cache(length, lengths[0]))
                return

    def _prefill(self, lengths: Sequence[int], prefix: TokenIds = NO_TOKENS) -> None:
        """Measure a step of prompts; with a prefix that is cached, unless the backend lost it."""
        seconds = [self.driver.prefill(lengths, prefix)]
        while len(seconds) < _NUM_REPEATS and seconds[0] <= _MAX_REPEAT_SHARE * self.budget_s:
            seconds.append(self.driver.prefill(lengths, prefix))
        if self.driver.num_cached != len(prefix) * len(lengths):
            return
        tokens = sum(lengths)
        step = MeasuredStep(
            seconds=float(np.median(seconds)),
            tokens=tokens,
            rows=len(lengths),
            **prompt_pairs(np.array(lengths), len(prefix)),
        )
        self.steps.append(step)
        if not len(prefix):
            self.token_s = step.seconds / tokens

    def _decode(self, num_rows: int, own_len: int, shared_len: int = 0) -> None:
        max_tokens = self._num_steps(shared_len, num_rows * own_len)
        steps = self.driver.decode(num_rows, own_len, shared_len, max_tokens=max_tokens)
        if not steps:
            return
        seconds, generated = zip(*steps, strict=True)
        self.decode_s = float(np.median(seconds))
        own = own_len + float(np.mean(generated))
        self.steps.append(
            MeasuredStep(
                seconds=self.decode_s,
                tokens=num_rows,
                rows=num_rows,
                # the rest of a fresh block has no memory behind it yet, and is read for nothing
                context_reads=num_rows * own,
                shared_pairs=num_rows * shared_len,
                shared_reads=shared_len,
            )
        )

    def _num_steps(self, *num_tokens: int) -> int:
        """Return tokens enough for rows that decode while prompts of others are computed."""
        return -(-sum(num_tokens) // self.budget) + 2 * _NUM_DECODE_STEPS

    def _is_possible(
        self, num_rows: int, own_len: int, shared_len: int = 0, *, share: float = 1.0
    ) -> bool:
        limits, num_tokens = self.limits, num_rows * own_len + shared_len
        longest = own_len + self._num_steps(num_tokens)
        held = shared_len + num_rows * -(-longest // limits.block_size) * limits.block_size
        fits = num_rows <= min(limits.max_num_seqs, self.budget) and held <= limits.kv_tokens
        seconds = num_tokens * self.token_s + _NUM_DECODE_STEPS * self.decode_s
        is_short = shared_len + longest <= self.max_len
        return fits and is_short and self._is_affordable(seconds, share)

    def _is_affordable(self, seconds: float, share: float = 1.0) -> bool:
        left = share * (self.end_s - self.clock())
        return seconds <= min(_MAX_SHARE * self.budget_s, left)


@dataclass(eq=False)
class _Driver:
    """Drives the backend through one batch at a time and reads the clock around its polls."""

    backend: Backend
    clock: Callable[[], float]
    vocab_size: int
    random: np.random.Generator
    next_id: int = 0
    group_id: int = 0
    # prompt tokens of the last prompts that were cached
    num_cached: int = 0

    def cache(self, length: int, own_len: int) -> TokenIds:
        """Return so many tokens whose KV the backend has from then on, if it keeps any."""
        prefix = self._tokens(length)
        self.group_id += 1
        self.prefill([own_len], prefix)
        return prefix

    def prefill(self, lengths: Sequence[int], prefix: TokenIds = NO_TOKENS) -> float:
        """Return the seconds that these prompts take up to their first tokens.

        All begin with `prefix`; `lengths` are without it.
        """
        requests = [self._request(length, max_tokens=1, prefix=prefix) for length in lengths]
        num_before = self.backend.stats().cached_tokens
        self.backend.submit(requests)
        seconds, num_polls = 0.0, 0
        while self.backend.num_unfinished():
            seconds += self._poll()[0]
            num_polls += 1
            if num_polls > _MAX_IDLE_POLLS + (len(prefix) + sum(lengths)) // _PREFILL_LENS[0]:
                raise MeasureError(f"a prompt did not end within {num_polls} polls")
        self.num_cached = self.backend.stats().cached_tokens - num_before
        return seconds

    def decode(
        self, num_rows: int, own_len: int, shared_len: int, *, max_tokens: int
    ) -> list[tuple[float, float]]:
        """Return the steps in which all rows decode; none if they never do.

        Of each the seconds, and the tokens that a row had before, on average. Prompts begin with
        `shared_len` tokens, and `own_len` differ from row to row; `max_tokens` of each row bounds
        the steps. The requests are taken out of the backend afterwards.
        """
        prefix = self._tokens(shared_len)
        self.group_id += 1
        requests = [
            self._request(own_len, max_tokens=max_tokens, prefix=prefix) for _ in range(num_rows)
        ]
        self.backend.submit(requests)
        steps: list[tuple[float, float]] = []
        total = num_full = 0
        for _ in range(2 * max_tokens):
            seconds, num_tokens = self._poll()
            # the first step in which every row gets a token still computes prompts
            num_full += num_tokens == num_rows
            if num_tokens == num_rows and num_full > 1:
                steps.append((seconds, total / num_rows))
            total += num_tokens
            if len(steps) == _NUM_DECODE_STEPS or not self.backend.num_unfinished():
                break
        self.backend.abort([request.request_id for request in requests])
        return steps

    def _request(self, length: int, *, max_tokens: int, prefix: TokenIds = NO_TOKENS) -> Request:
        self.next_id += 1
        return Request(
            request_id=self.next_id,
            row_id=f"measured-{self.next_id}",
            prompt_token_ids=np.concatenate((prefix, self._tokens(length))),
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            group_id=self.group_id if len(prefix) else None,
            prefix_len=len(prefix),
        )

    def _tokens(self, length: int) -> TokenIds:
        return self.random.integers(0, self.vocab_size, length).astype(np.int32)

    def _poll(self) -> tuple[float, int]:
        """Return the seconds of one poll and the tokens that it generated."""
        num_before = self.backend.stats().generated_tokens
        began = self.clock()
        completions = self.backend.poll()
        seconds = self.clock() - began
        for completion in completions:
            if completion.error:
                raise MeasureError(f"the backend failed a measured prompt: {completion.error}")
        return seconds, self.backend.stats().generated_tokens - num_before
