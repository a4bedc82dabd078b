"""Starts vLLM in this process, once the environment is what vLLM reads when it is imported.

`VllmEngine` has the scheduler in this process too. Its scheduler is patched to leave room for
running requests, and its kernels for CPUs to leave rows without an adapter alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from raybatch.backends.base import EngineStart, ScoreForm
from raybatch.backends.vllm.adapter import Adapter
from raybatch.backends.vllm.args import DENSE_RANKS, devices_of, engine_args, vllm_options
from raybatch.backends.vllm.backend import VllmBackend
from raybatch.backends.vllm.model import form_of_scores, is_streamed, model_for
from raybatch.backends.vllm.ranks import VllmRanks
from raybatch.backends.vllm.requests import InnerEngine, Parse, ScorePairs
from raybatch.backends.vllm.versions import adapter as adapter_of_installed
from raybatch.config import BackendConfig, EngineConfig, environment
from raybatch.engine.memory.kv_cache import free_memory_bytes
from raybatch.errors import ConfigError, error_text
from raybatch.models.source import resolve_tokenizer
from raybatch.records.share import ShareLink

if TYPE_CHECKING:
    from raybatch.backends.vllm.sharing import VllmShare


from collections.abc import Sequence
from typing import TYPE_CHECKING

from raybatch.backends.vllm.frontend import Frontend
from raybatch.backends.vllm.requests import Answer, Progress, RequestRefused
from raybatch.engine.weights.weight_buffers import WeightCounters
from raybatch.records.types import Task

if TYPE_CHECKING:
    from raybatch.backends.vllm.sharing import VllmShare


from collections.abc import Iterable
from functools import wraps

# steps for which running requests find room, as in the native engine; more start requests later
_STEPS = 4
# each has the inputs, the adapters, the output and the adapter of each row in this order
_OPS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def blocks_to_grow(
    num_tokens: int, max_tokens: int, block_size: int, num_steps: int = _STEPS
) -> int:
    """Return how many KV blocks more a request will need within the next `num_steps` steps.

    It has `num_tokens` tokens of prompt and output now, gets one per step, and ends at
    `max_tokens`; the last token needs no KV.
    """
    grown = min(num_tokens + num_steps, max_tokens - 1)
    return max(0, -(-grown // block_size) - -(-num_tokens // block_size))


def leave_room(scheduler: Any, block_size: int) -> None:  # noqa: ANN401 - vLLM's own type
    """Patch vLLM's scheduler to start a request only if running ones can still grow for some steps.

    vLLM by default starts every request that fits at this moment; it then preempts and recomputes
    it when running requests grow. Its option `watermark`, a fixed number of blocks to keep free,
    still holds. A scheduler without that option is not changed.
    """
    manager = scheduler.kv_cache_manager
    fixed = getattr(manager, "watermark_blocks", None)
    if fixed is None:
        return
    schedule, allocate = scheduler.schedule, manager.allocate_slots
    # blocks that are left free in one step, counted when they are first asked for
    taken: int | None = None

    def room_of(requests: Iterable[Any]) -> int:
        return sum(
            blocks_to_grow(r.num_tokens, r.num_prompt_tokens + r.max_tokens, block_size)
            for r in requests
        )

    def scheduled(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        nonlocal taken
        taken = None
        return schedule(*args, **kwargs)

    def allocated(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        nonlocal taken
        if request.status.name not in ("WAITING", "PREEMPTED"):
            return allocate(request, *args, **kwargs)
        taken = room_of(scheduler.running) if taken is None else taken
        needed = room_of([request])
        manager.watermark_blocks = max(fixed, taken + needed)
        blocks = allocate(request, *args, **kwargs)
        if blocks is not None:
            taken += needed
        return blocks

    scheduler.schedule, manager.allocate_slots = scheduled, allocated


def leave_bare_rows_alone(vllm: Any) -> None:  # noqa: ANN401 - names of vLLM
    """Patch vLLM's CPU kernels so that they apply no adapter to rows that have none.

    These kernels read the adapter index -1, "none", as the last adapter slot: once that slot is
    used, rows without an adapter are answered with its adapter. The GPU kernels skip such rows. A
    second call has no effect.
    """
    for name in _OPS:
        op = getattr(vllm.lora_ops, name)
        if hasattr(op, "__wrapped__"):
            continue
        # each of both modules calls them by its own name
        for module in (vllm.lora_ops, vllm.punica_cpu):
            setattr(module, name, _without_bare_rows(op))


def _without_bare_rows(op: Callable[..., None]) -> Callable[..., None]:
    @wraps(op)
    def masked(
        inputs: torch.Tensor,  # [T, in]
        weights: torch.Tensor,  # [adapters, out, in]
        output: torch.Tensor,  # [T, out]
        adapters: torch.Tensor,  # [T]
        *args: Any,  # noqa: ANN401 - vLLM's own
        **options: Any,  # noqa: ANN401
    ) -> None:
        zero = torch.zeros((), dtype=inputs.dtype, device=inputs.device)
        inputs = torch.where(adapters[:, None] < 0, zero, inputs)
        op(inputs, weights, output, adapters, *args, **options)

    return masked


class VllmEngine:
    """Runs an `LLMEngine` of vLLM with its scheduler in this process; used by one thread.

    With `check_logits`, requests with NaN logits end as errors; vLLM must have been started with
    VLLM_COMPUTE_NANS_IN_LOGITS. `share` holds the weights that this engine shares with other
    replicas; None if it loaded its own.
    """

    def __init__(
        self,
        engine: Any,  # noqa: ANN401 - `LLMEngine`
        adapter: Adapter,
        *,
        check_logits: bool,
        share: VllmShare | None = None,
    ) -> None:
        adapter.check(engine, adapter.read_here, "its engine")
        self._engine = engine
        self._adapter = adapter
        self.share = share
        self._client = engine.engine_core
        self._scheduler = self._client.engine_core.scheduler
        self._frontend = Frontend(engine, adapter, engine.add_lora)
        self.capacity = self._frontend.capacity
        self.vocab_size = self._frontend.vocab_size
        self.eos_token_ids = self._frontend.eos_token_ids
        self.output_parser = self._frontend.output_parser
        # by key: the id inside vLLM, and its scheduler's record of the request
        self._requests: dict[str, tuple[str, Any]] = {}
        self._is_checked = False
        self._num_preemptions = self._num_steps = 0
        leave_room(self._scheduler, self.capacity().block_size)
        self._watch_outputs(checks_logits=check_logits)

    def pool_for(self, task: Task, form: ScoreForm) -> None:
        """Switch to requests of a pooling task; raise ConfigError if the model does not support it.

        `form` says how the model gets query and document of a score, see `ScoreForm`.
        """
        self._frontend.pool_for(task, form, self._engine.get_supported_tasks())

    def add(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> None:
        """Queue a request behind all others; raise RequestRefused if vLLM refuses it.

        `key` is a new name for it; tokens and options are those of `Frontend.make`.
        """
        try:
            try:
                inner_id = self._queue(key, prompt_token_ids, params)
            except self._frontend.images_gone as error:
                self._engine.abort_request([key])
                self._frontend.forget_images(error)
                inner_id = self._queue(key, prompt_token_ids, params)
        except self._frontend.refusals as error:
            # it may have come half of the way
            self._engine.abort_request([key])
            raise RequestRefused(str(error)) from error
        request = self._scheduler.requests[inner_id]
        self._requests[key] = inner_id, request
        if not self._is_checked:
            self._frontend.check_request(inner_id)
            self._adapter.check(request, self._adapter.read_of_request, "its scheduler's request")
            self._is_checked = True

    def _queue(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> str:
        """Queue a request and return its id inside vLLM."""
        made = self._frontend.make(prompt_token_ids, params)
        inner_id = self._engine.add_request(
            key, made.prompt, made.params, lora_request=made.adapter
        )
        return str(inner_id)

    def step(self) -> list[Answer]:
        """Run one step and return the requests that ended in it.

        If vLLM raises, the engine cannot be used any more.
        """
        answers = []
        outputs = self._engine.step()
        self._num_steps += 1
        for output in outputs:
            _, request = self._requests.pop(output.request_id)
            self._num_preemptions += request.num_preemptions
            answers.append(self._frontend.answer(output))
        # those whose logits are not numbers, and that would go on
        bad = [key for key in self._frontend.not_finite if key in self._requests]
        taken = self.take(bad) if bad else {}
        answers += [Answer(key, taken[key], "error", None, is_finite=False) for key in bad]
        self._frontend.not_finite.clear()
        return answers

    def take(self, keys: Sequence[str]) -> dict[str, Progress]:
        """Abort requests, and return what each has generated, by key."""
        taken = {key: self.progress(key) for key in keys}
        self._engine.abort_request(list(keys))
        for key in keys:
            _, request = self._requests.pop(key)
            self._num_preemptions += request.num_preemptions
        return taken

    def progress(self, key: str) -> Progress:
        """Return the tokens that a request has generated so far."""
        return self._frontend.progress(self._requests[key][0])

    def num_tokens(self, key: str) -> int:
        """Return the number of tokens that a request has generated so far."""
        return self._frontend.num_tokens(self._requests[key][0])

    def has_started(self, key: str) -> bool:
        """Return whether a request was ever scheduled."""
        _, request = self._requests[key]
        return bool(request.status.name == "RUNNING" or request.num_preemptions)

    def generated_tokens(self) -> int:
        """Return the number of tokens that all requests have generated, finished ones included."""
        return self._frontend.generated_tokens

    def num_running(self) -> int:
        """Return the number of requests that vLLM's scheduler runs."""
        return len(self._scheduler.running)

    def num_steps(self) -> int:
        """Return the number of finished steps."""
        return self._num_steps

    def num_preemptions(self) -> int:
        """Return the number of preemptions, counted when their request ends or is aborted."""
        return self._num_preemptions

    def kv_used_fraction(self) -> float:
        """Return the fraction of the KV cache that running requests hold, from 0 to 1."""
        return float(self._scheduler.kv_cache_manager.usage)

    def weight_counters(self) -> WeightCounters:
        """Return the counters of weight copies; all 0 if weights are not shared."""
        return WeightCounters() if self.share is None else self.share.counters

    def reset(self) -> None:
        """Drop all requests and cached prefixes, and set `generated_tokens` to 0."""
        self.take(list(self._requests))
        self._engine.reset_prefix_cache()
        self._frontend.generated_tokens = 0

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._client.shutdown()
        if self.share is not None:
            self.share.close()

    def _watch_outputs(self, *, checks_logits: bool) -> None:
        get_output = self._client.get_output

        def watched() -> Any:  # noqa: ANN401 - vLLM's own type
            outputs = get_output()
            self._frontend.count_tokens(outputs)
            if checks_logits:
                self._frontend.note_not_finite(outputs)
            return outputs

        self._client.get_output = watched


_Kind = TypeVar("_Kind", VllmEngine, VllmRanks)

_ENVIRONMENT = {
    # the engine core in this process: its scheduler is read, and its memory is shared
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # on a CPU: OMP_NUM_THREADS counts, and engines of one host do not meet on its first cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# of the memory that is free before the weights are loaded
_CPU_KV_FRACTION = 0.4
# vLLM takes 128, which shares less
_CPU_BLOCK_SIZE = EngineConfig().block_size_tokens


def create(start: EngineStart) -> VllmBackend:
    """Start vLLM in this process and return a backend that is ready for `submit`.

    Raises ConfigError, or whatever vLLM raises; an engine that has started is stopped then.
    """
    options = vllm_options(start.backend, start.engine)
    parsers = {name: getattr(options, name) for name in ("reasoning_parser", "tool_call_parser")}
    inner = start_inner(
        start.model,
        start.backend,
        start.engine,
        num_engines_on_host=start.num_engines_on_host,
        link=start.share,
    )
    try:
        parse: Parse | None = None
        if any(parsers.values()):
            assert isinstance(inner, VllmEngine | VllmRanks), "what is pooled has no parsers"
            parse = inner.output_parser(**parsers)
        return VllmBackend(inner, start.backend.task, parse)
    except BaseException:
        inner.close()
        raise


def start_inner(
    model: str,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    link: ShareLink | None = None,
) -> InnerEngine:
    """Start vLLM in this process and return the bare engine, for `VllmBackend`.

    Sets environment variables that vLLM reads; most of them only if they are unset.
    """
    options = vllm_options(backend, engine)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = str(int(options.check_logits))
    is_pooling = backend.task != "generate"
    given = model_for(model, options.engine_kwargs)
    form: ScoreForm = "apart"
    if is_pooling:
        folder = resolve_tokenizer(model) if is_streamed(model, options.engine_kwargs) else given
        form = form_of_scores(Path(folder), options.engine_kwargs)
    adapter, share = adapter_of_installed(), None
    if link is not None:
        from raybatch.backends.vllm.sharing import VllmShare

        share = VllmShare(link, engine, adapter)
    started = _start_engine(
        given,
        engine_args(options, engine, backend.task),
        adapter,
        check_logits=options.check_logits,
        num_engines_on_host=num_engines_on_host,
        share=share,
    )
    if not is_pooling:
        return started
    try:
        started.pool_for(backend.task, form)
    except BaseException:
        started.close()
        raise
    return ScorePairs(started) if backend.task == "score" and form == "apart" else started


def _start_engine(
    model: str,
    args: Mapping[str, Any],
    adapter: Adapter,
    *,
    check_logits: bool,
    num_engines_on_host: int,
    share: VllmShare | None,
) -> VllmEngine | VllmRanks:
    """Start an engine with options of vLLM's `EngineArgs`."""
    vllm = adapter.load("engine")
    with _refusing():
        args = _with_configs(args, vllm.EngineArgs)
    if vllm.current_platform.is_cpu():
        args = _on_cpu(args, adapter, num_engines_on_host)
    if share is not None:
        args = share.arguments(args)
    with _refusing():
        made = vllm.EngineArgs(model=model, **args)
        config = made.create_engine_config(vllm.UsageContext.LLM_CLASS)
    if share is not None:
        share.settle(config)
    parts = {
        "vllm_config": config,
        "executor_class": vllm.Executor.get_class(config),
        "log_stats": not args["disable_log_stats"],
        "usage_context": vllm.UsageContext.LLM_CLASS,
    }
    is_pooling = config.model_config.runner_type == "pooling"
    check_logits = check_logits and not is_pooling
    if config.parallel_config.data_parallel_size == 1:
        engine = vllm.LLMEngine(**parts, multiprocess_mode=False)
        make = partial(VllmEngine, check_logits=check_logits, share=share)
        return _or_closed(make, engine, adapter)
    if not config.model_config.is_moe:
        raise ConfigError(DENSE_RANKS)
    engine = vllm.AsyncLLM(**parts)
    return _or_closed(partial(VllmRanks, check_logits=check_logits), engine, adapter)


def _or_closed(
    make: Callable[[Any, Adapter], _Kind],
    engine: Any,  # noqa: ANN401 - vLLM's
    adapter: Adapter,
) -> _Kind:
    """Return an engine of vLLM as one of ours, or end it with the error that it meets."""
    try:
        return make(engine, adapter)
    except BaseException:
        engine.engine_core.shutdown()
        raise


@contextmanager
def _refusing() -> Iterator[None]:
    """Make a ConfigError of what vLLM raises where an option cannot be."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        # pydantic writes several lines, of which a log would show one
        message = " ".join(error_text(error).split())
        raise ConfigError(f"vLLM refuses the options of its engine: {message}") from error


def _with_configs(args: Mapping[str, Any], known: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Return options in which a mapping is the config that it stands for, as `LLM` does it."""
    kinds: dict[str, Any] = {f.name: f.default_factory for f in fields(known)}
    if unknown := sorted(set(args) - set(kinds)):
        raise ConfigError(
            f"engine_kwargs: the installed vLLM has no option {', '.join(unknown)}; remove it"
        )
    made = dict(args)
    for name, value in args.items():
        kind = kinds[name]
        if isinstance(value, Mapping) and isinstance(kind, type) and is_dataclass(kind):
            made[name] = kind(**value)
    return made


def _on_cpu(args: dict[str, Any], adapter: Adapter, num_engines_on_host: int) -> dict[str, Any]:
    """Override defaults of vLLM for a dedicated or long-running host.

    ConfigError for what its kernels for CPUs would end with the process at, or later on.
    """
    vllm = adapter.load("cpu")
    if args.get("enable_expert_parallel"):
        raise ConfigError(
            "engine_kwargs.enable_expert_parallel: vLLM has no expert parallelism on CPUs; leave "
            "it out"
        )
    # what ranks exchange before and after their experts; without, the first step fails
    if args.get("data_parallel_size", 1) > 1 and "all_gatherv" not in vars(vllm.CpuCommunicator):
        raise ConfigError(
            "engine_kwargs.data_parallel_size: vLLM has no data parallelism on CPUs; leave it out "
            "and set pool.replicas to run several engines"
        )
    # newer ones do it themselves
    if args.get("enable_lora") and "cpu_lora" in adapter.names:
        leave_bare_rows_alone(adapter.load("cpu_lora"))
    args.setdefault("enforce_eager", True)
    args.setdefault("block_size", _CPU_BLOCK_SIZE)
    if args.get("dtype", "auto") == "auto":
        args["dtype"] = "float32"
    has_size = {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(args)
    if not has_size and not environment().get("VLLM_CPU_KVCACHE_SPACE"):
        # the memory node to which vLLM will hold its cache
        node = vllm.get_memory_node_info(vllm.get_allowed_cpu_list()[0].numa_node)
        free = min(free_memory_bytes(torch.device("cpu")), int(node.available_memory))
        # each rank has as much
        num_caches = num_engines_on_host * devices_of(args)
        args["kv_cache_memory_bytes"] = int(_CPU_KV_FRACTION * free / num_caches)
    return args
