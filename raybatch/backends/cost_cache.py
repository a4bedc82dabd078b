"""Cost models: measured when a backend is first used on a kind of host, then read from disk.

The measurement runs a short program of random prompts, and skips parts that would take too long,
the least important ones last. The caller's process runs the backend;
`raybatch.actors.executors.ray_pools` runs it on a host of the replicas.
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

# timeout after the start: the program takes about 10 s, longer only for very slow models
MEASURE_S = 300.0
NO_SPEED_OF_ENDPOINTS = "the speed of an endpoint is not measured: every request may cost money"

# share of wall time that an engine on a quiet host spends on the CPU
QUIET_SHARE = 0.85
_GPU_INFO = "driver/nvidia/gpus/*/information"

# vocabulary size that every model has
MIN_VOCAB_SIZE = 128
_PREFILL_LENS = (16, 64, 256, 1024, 4096)
_SHORT_PROMPT_LEN = 64
# own tokens of each prompt with a cached prefix
_CACHED_PROMPTS = [32] * 8
_DECODE_ROWS = (1, 4, 16, 64)
_MORE_DECODE_ROWS = (8, 32, 256, 1024)
_SHORT_LEN = 8
# numbers of sequences and their lengths; the first possible pair is measured, so that a large batch
# has a long context
_CONTEXTS = ((64, 512), (64, 256), (16, 512), (16, 256), (16, 192), (16, 128), (16, 64))
_MORE_CONTEXTS = ((16, 128),)
_SHARED_ROWS = (32, 8)
_SHARED_LENS = (1024, 512, 256, 128, 64)
_NUM_REPEATS = 3
_NUM_DECODE_STEPS = 5
_MAX_IDLE_POLLS = 64
# shares of the time budget: for one batch of the program, and for a repetition
_MAX_SHARE = 0.3
_MAX_REPEAT_SHARE = 0.03
# share of the remaining time for a batch that similar ones follow
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
    """Return the stored cost model of a backend on this host, or measure and store one.

    Measuring loads the model and takes about 10 s more, which is logged. If a CPU engine got much
    less CPU time than wall time, the host was busy, and the result is returned but not stored.
    Raises MeasureError if the backend cannot be started or measured.

    Args:
        num_engines_on_host: number of engines that share the memory of the host.
        folder: folder of cost models; None is the default one.
        clock, cpu_clock, create: replaced by tests.
    """
    path = cost_model_path(
        model, backend, engine, num_engines_on_host=num_engines_on_host, folder=folder
    )
    if (cached := load_cost_model(path)) is not None:
        return cached
    _logger.info("measuring step costs of %s on this host, to store them", model)
    began = clock()
    try:
        # a draft token costs as much as a row of a step
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
        "step costs were measured in %.1f s after %.1f s of loading, with a fit error of %.0f %%",
        took_s,
        loaded - began,
        100 * measured.fit_error,
    )
    is_on_cpu = type_of(backend).has_weights and (engine.device == "cpu" or not _gpu_names())
    if not is_on_cpu or _was_quiet(took_s, cpu_s):
        write_cached(measured, path, what="cost model")
    return measured


def _was_quiet(took_s: float, cpu_s: float) -> bool:
    """Return whether an engine was measured on a quiet CPU; warn if not."""
    if cpu_s >= QUIET_SHARE * took_s:
        return True
    _logger.warning(
        "not storing the measured step costs: the host is busy, and the engine got only %.0f %% of "
        "a CPU; the next run measures again",
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
    """Return the path of a cost model of this host, whether it exists or not.

    Its name is a hash of all that the costs depend on, such as model, options and hardware.
    """
    described = {
        "model": _model_identity(model),
        "backend": {"kind": backend.kind, "options": dict(backend.options)},
        "engine": asdict(replace(engine, speculative_tokens=None)),
        # engines divide the memory of a host unless kv_cache_bytes is set
        "num_engines_on_host": num_engines_on_host if engine.kv_cache_bytes is None else None,
        "host": {"cpu": cpu_name(), "gpus": [] if engine.device == "cpu" else _gpu_names()},
        "versions": versions(type_of(backend).packages),
    }
    return cached_path("cost-models", described, folder)


def load_cost_model(path: Path) -> CostModel | None:
    """Read a cost model; None if there is none, or, with a warning, if the file is broken."""
    return read_cached(CostModel, path, what="cost model")


def _model_identity(model: str) -> str:
    """Return a key that checkpoints of equal speed share, independent of their paths."""
    folder = Path(without_content(model)).expanduser()
    config = folder / "config.json"
    if not config.is_file():
        return plain_name(model)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return f"{hashlib.sha256(config.read_bytes()).hexdigest()}-{num_bytes}"


def _vocab_size(model: str) -> int:
    """Return the vocabulary size of a local model, else the least of all models."""
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
    """Return the batch limits of a backend.

    `max_batched_tokens` is the limit of tokens of a step if the backend reports none.
    """
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
    """Run prompts of several lengths and batches of several sizes; return the measured steps.

    The backend must be idle, and is idle afterwards; its counters keep counting. Raises
    MeasureError if the backend fails a prompt, does not finish, or is too small.

    Args:
        clock: returns the time in seconds.
        budget_s: about how long to measure; a slow model runs fewer batches.
        vocab_size: number of token ids for random prompts.
        seed: seed of the prompts.
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
    # seconds per prompt token and per decode step, of the last and largest step
    token_s: float = 0.0
    decode_s: float = 0.0
    steps: list[MeasuredStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = self.limits.max_batched_tokens or self.limits.kv_tokens
        self.max_prompt = min(self.max_len - 2 * _NUM_DECODE_STEPS, self.limits.kv_tokens - 1)

    def run(self) -> list[MeasuredStep]:
        length = min(_PREFILL_LENS[0], self.max_prompt)
        if length < 1:
            raise MeasureError(
                f"the backend is too small to be measured: a row may have only {self.max_len} "
                "tokens in it"
            )
        # warm-up
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
        # the same number of tokens in short prompts: less attention, more first tokens
        num_prompts = min(int(self.steps[-1].tokens) // _SHORT_PROMPT_LEN, self.limits.max_num_seqs)
        lengths = [_SHORT_PROMPT_LEN] * num_prompts
        if num_prompts > 1 and self._is_affordable(sum(lengths) * self.token_s):
            self._prefill(lengths)

    def _measure_decodes(self, sizes: Sequence[int]) -> None:
        for num_rows in sizes:
            self._decode_first([(num_rows, _SHORT_LEN)])

    def _measure_shared(self) -> None:
        lengths = [n for n in _SHARED_LENS if n % self.limits.block_size == 0]
        # two group sizes separate reads per group from reads per row
        for num_rows, share in zip(_SHARED_ROWS, (_MORE_TO_COME, 1.0), strict=True):
            self._decode_first([(num_rows, _SHORT_LEN, length) for length in lengths], share)

    def _decode_first(self, batches: Sequence[tuple[int, ...]], share: float = 1.0) -> None:
        """Measure the first possible batch, given as (rows, own tokens, shared tokens)."""
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
        """Measure a step of prompts; discard it if the backend lost a cached prefix."""
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
                # unused positions of a new block cost no memory reads
                context_reads=num_rows * own,
                shared_pairs=num_rows * shared_len,
                cascade_reads=shared_len,
            )
        )

    def _num_steps(self, *num_tokens: int) -> int:
        """Return enough tokens for rows that decode while prompts of others are computed."""
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
    """Runs one batch at a time on the backend, and times its polls."""

    backend: Backend
    clock: Callable[[], float]
    vocab_size: int
    random: np.random.Generator
    next_id: int = 0
    group_id: int = 0
    # prompt tokens of the last prompts that were cached
    num_cached: int = 0

    def cache(self, length: int, own_len: int) -> TokenIds:
        """Return a random prefix of `length` tokens, whose KV the backend has cached if it can.

        It is cached by a prompt with `own_len` further tokens.
        """
        prefix = self._tokens(length)
        self.group_id += 1
        self.prefill([own_len], prefix)
        return prefix

    def prefill(self, lengths: Sequence[int], prefix: TokenIds = NO_TOKENS) -> float:
        """Return the seconds until all of these prompts have their first token.

        All prompts start with `prefix`, and have as many further tokens as `lengths` says.
        """
        requests = [self._request(length, max_tokens=1, prefix=prefix) for length in lengths]
        num_before = self.backend.stats().cached_tokens
        self.backend.submit(requests)
        seconds, num_polls = 0.0, 0
        while self.backend.num_unfinished():
            seconds += self._poll()[0]
            num_polls += 1
            if num_polls > _MAX_IDLE_POLLS + (len(prefix) + sum(lengths)) // _PREFILL_LENS[0]:
                raise MeasureError(
                    f"the backend did not finish a measured prompt within {num_polls} polls"
                )
        self.num_cached = self.backend.stats().cached_tokens - num_before
        return seconds

    def decode(
        self, num_rows: int, own_len: int, shared_len: int, *, max_tokens: int
    ) -> list[tuple[float, float]]:
        """Return (seconds, mean generated tokens of a row before it) of each step of all rows.

        Steps in which not all rows decode are left out. The requests are aborted afterwards.

        Args:
            own_len: tokens of each prompt after those that all have in common.
            shared_len: tokens that all prompts have in common, at their start.
            max_tokens: tokens that each row may generate, which limits the steps.
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
            # the first step with a token for every row still computes prompts
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
