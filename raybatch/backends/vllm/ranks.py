"""vLLM's engine with data-parallel ranks: each has its scheduler in a separate process.

The ranks of a mixture of experts compute in step, and share its experts. Rows of one prefix go to
one rank, so that they hit its cache.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil

from raybatch.backends.base import ScoreForm
from raybatch.backends.vllm.adapter import Adapter
from raybatch.backends.vllm.frontend import Frontend
from raybatch.backends.vllm.requests import Answer, Progress, RequestRefused
from raybatch.engine.weights.weight_buffers import WeightCounters
from raybatch.records.types import NO_TOKENS, Task, TokenIds

_T = TypeVar("_T")

# timeout of `step` without an ended request, so that rows can be added or taken
_STEP_S = 0.02
# lead of a rank over the one with the fewest requests, as a fraction of `max_num_seqs`
_AHEAD_FRACTION = 1 / 8

# prefix of the process titles of vLLM
_TITLE = "VLLM::"
# nothing is written: `read` returns when the process with the other end of the pipe exits
_SCRIPT = f"""
read _
for pid in "$@"; do
  grep -q '^{_TITLE}' /proc/$pid/cmdline 2>/dev/null && kill -9 $pid
done
"""


class RanksEndedError(RuntimeError):
    """A rank exited, so vLLM stops the others too."""


class RankRouter:
    """Routes a prompt to the rank whose last prompt shares the most leading blocks with it.

    Skips ranks with over `max_ahead` more open requests than the rank with the fewest.
    """

    def __init__(self, num_ranks: int, *, max_ahead: int, block_size: int) -> None:
        self._last: list[TokenIds] = [NO_TOKENS] * num_ranks
        self._num_open = [0] * num_ranks
        self._max_ahead = max_ahead
        self._block_size = block_size

    def choose(self, prompt: TokenIds) -> int:
        """Return the rank for a request with this prompt, and count the request as open there."""
        limit = min(self._num_open) + self._max_ahead
        ranks = [rank for rank, number in enumerate(self._num_open) if number <= limit]
        rank = max(ranks, key=lambda r: (self._shared_blocks(r, prompt), -self._num_open[r]))
        self._last[rank] = prompt
        self._num_open[rank] += 1
        return rank

    def end(self, rank: int) -> None:
        """Note that an open request of this rank has ended."""
        self._num_open[rank] -= 1

    def _shared_blocks(self, rank: int, prompt: TokenIds) -> int:
        length = min(len(prompt), len(self._last[rank]))
        differs = np.flatnonzero(prompt[:length] != self._last[rank][:length])
        return int(differs[0] if len(differs) else length) // self._block_size


class _Guard:
    """Kills the processes of an engine when this one exits, even after a kill."""

    def __init__(self) -> None:
        children = psutil.Process().children(recursive=True)
        pids = [str(child.pid) for child in children if child.name().startswith(_TITLE)]
        self._waiting = subprocess.Popen(
            ["sh", "-c", _SCRIPT, "sh", *pids],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # it must not get an interrupt of the terminal
            start_new_session=True,
        )

    def close(self) -> None:
        """Stop guarding."""
        self._waiting.kill()
        self._waiting.communicate()


class _Sent(NamedTuple):
    inner_id: str
    rank: int
    outputs: asyncio.Task[None]  # waits for the end


class VllmRanks:
    """Runs an `AsyncLLM` of vLLM with several data-parallel ranks; used by one thread.

    Its event loop runs only inside the methods of this object. `num_preemptions` is always 0,
    because vLLM does not report them here. `check_logits` as in `VllmEngine`.
    """

    def __init__(
        self,
        engine: Any,  # noqa: ANN401 - `AsyncLLM`
        adapter: Adapter,
        *,
        check_logits: bool,
    ) -> None:
        adapter.check(engine, adapter.read_of_ranks, "its engine")
        self._guard = _Guard()
        self._engine = engine
        self._client = engine.engine_core
        self._loop = asyncio.new_event_loop()
        self._frontend = Frontend(engine, adapter, lambda lora: self._run(engine.add_lora(lora)))
        self.capacity = self._frontend.capacity
        self.vocab_size = self._frontend.vocab_size
        self.eos_token_ids = self._frontend.eos_token_ids
        self.output_parser = self._frontend.output_parser
        capacity, config = self.capacity(), engine.vllm_config
        self._router = RankRouter(
            config.parallel_config.data_parallel_size,
            max_ahead=int(config.scheduler_config.max_num_seqs * _AHEAD_FRACTION),
            block_size=capacity.block_size,
        )
        self._requests: dict[str, _Sent] = {}
        # inner ids of requests without output yet
        self._unstarted: set[str] = set()
        self._is_checked = False
        self._ended: dict[str, Answer] = {}
        self._failure: BaseException | None = None
        self._news = asyncio.Event()
        self._num_steps = 0
        self._watch_outputs(checks_logits=check_logits)

    def pool_for(self, task: Task, form: ScoreForm) -> None:
        """Switch to requests of a pooling task; raise ConfigError if the model does not support it.

        `form` says how the model gets query and document of a score, see `ScoreForm`.
        """
        self._frontend.pool_for(task, form, self._run(self._engine.get_supported_tasks()))

    def add(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> None:
        """Queue a request at one of the ranks; raise RequestRefused if vLLM refuses it.

        `key` is a new name for it; tokens and options are those of `Frontend.make`.
        """
        try:
            made = self._frontend.make(prompt_token_ids, params)
        except self._frontend.refusals as error:
            raise RequestRefused(str(error)) from error
        rank = self._router.choose(np.array(prompt_token_ids, np.int32))
        try:
            outputs = self._run(
                self._engine.add_request(
                    key,
                    made.prompt,
                    made.params,
                    lora_request=made.adapter,
                    data_parallel_rank=rank,
                )
            )
        except self._frontend.refusals as error:
            self._router.end(rank)
            raise RequestRefused(str(error)) from error
        waiting = self._loop.create_task(self._wait_for(key, outputs))
        self._requests[key] = _Sent(outputs.request_id, rank, waiting)
        self._unstarted.add(outputs.request_id)
        if not self._is_checked:
            self._frontend.check_request(outputs.request_id)
            self._is_checked = True

    def step(self) -> list[Answer]:
        """Return the requests that have ended; wait a moment for the first one.

        If vLLM raises, the engine cannot be used any more.
        """
        self._run(self._wait_for_news())
        if self._failure is not None:
            raise self._failure
        ended, self._ended = self._ended, {}
        for key in ended:
            sent = self._requests.pop(key)
            self._router.end(sent.rank)
            self._unstarted.discard(sent.inner_id)
        bad = [key for key in self._frontend.not_finite if key in self._requests]
        answers = [Answer(k, p, "error", None, is_finite=False) for k, p in self.take(bad).items()]
        # requests that have just ended are returned by the next step
        self._frontend.not_finite.intersection_update(self._requests)
        return [*ended.values(), *answers]

    def take(self, keys: Sequence[str]) -> dict[str, Progress]:
        """Abort requests, and return what each has generated, by key."""
        taken = {key: self.progress(key) for key in keys}
        sent = [self._requests.pop(key) for key in keys]
        for each in sent:
            each.outputs.cancel()
            self._router.end(each.rank)
        self._unstarted.difference_update(each.inner_id for each in sent)
        for key in keys:
            self._ended.pop(key, None)
        if sent:
            self._run(self._engine.abort([each.inner_id for each in sent], internal=True))
        return taken

    def progress(self, key: str) -> Progress:
        """Return the tokens that a request has generated so far."""
        if self._has_output(key):
            return self._ended[key].progress
        return self._frontend.progress(self._requests[key].inner_id)

    def num_tokens(self, key: str) -> int:
        """Return the number of tokens that a request has generated so far."""
        if self._has_output(key):
            return len(self._ended[key].progress.token_ids)
        return self._frontend.num_tokens(self._requests[key].inner_id)

    def has_started(self, key: str) -> bool:
        """Return whether a request has generated a token; progress of its prefill is unknown."""
        return self._requests[key].inner_id not in self._unstarted

    def generated_tokens(self) -> int:
        """Return the number of tokens that all requests have generated, finished ones included."""
        return self._frontend.generated_tokens

    def num_running(self) -> int:
        """Return the number of requests that have generated a token."""
        return len(self._requests) - len(self._unstarted)

    def num_steps(self) -> int:
        """Return the number of engine steps that have finished, summed over the ranks.

        A call of `step` may return before any has.
        """
        return self._num_steps

    def num_preemptions(self) -> int:
        return 0

    def kv_used_fraction(self) -> float:
        """Return the fraction of the KV cache in use, from 0 to 1, as the ranks last reported."""
        return float(np.mean([used for _, _, used in self._client.lb_engines]))

    def weight_counters(self) -> WeightCounters:
        return WeightCounters()

    def reset(self) -> None:
        """Drop all requests and cached prefixes, and set `generated_tokens` to 0."""
        self.take(list(self._requests))
        self._run(self._engine.reset_prefix_cache())
        self._frontend.generated_tokens = 0

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._guard.close()
        self._engine.shutdown()
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._run(asyncio.wait(tasks))
        self._loop.close()

    def _has_output(self, key: str) -> bool:
        """Return whether a request has ended that `step` has not returned yet."""
        while key not in self._ended and not self._frontend.has(self._requests[key].inner_id):
            # its output is on the way
            self._run(asyncio.sleep(0))
            if self._failure is not None:
                raise self._failure
        return key in self._ended

    def _run(self, work: Coroutine[Any, Any, _T] | asyncio.Future[_T]) -> _T:
        return self._loop.run_until_complete(work)

    async def _wait_for_news(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), _STEP_S)
        self._news.clear()

    async def _wait_for(self, key: str, outputs: Any) -> None:  # noqa: ANN401 - vLLM's collector
        try:
            try:
                answer = self._frontend.answer(await outputs.get())
            except self._frontend.ends_of_one:
                # vLLM 0.33 raises it; other versions end the request with this reason
                answer = Answer(key, Progress(), "error", None, is_finite=True)
            if answer.finish_reason == "abort":
                # `take` awaits none of its aborts, so vLLM aborted the request; the row is not bad
                raise RanksEndedError(
                    "vLLM aborted a request by itself, so a data-parallel rank has probably exited"
                )
            self._ended[key] = answer
        except Exception as error:  # whatever ends a rank ends the engine
            self._failure = error
        self._news.set()

    def _watch_outputs(self, *, checks_logits: bool) -> None:
        get_output = self._client.get_output_async

        async def watched() -> Any:  # noqa: ANN401 - vLLM's own type
            outputs = await get_output()
            self._num_steps += 1
            self._unstarted.difference_update(output.request_id for output in outputs.outputs)
            self._frontend.count_tokens(outputs)
            if checks_logits:
                self._frontend.note_not_finite(outputs)
            return outputs

        self._client.get_output_async = watched
