"""Hugging Face transformers as a backend: slow and exact, for models that no other engine runs.

Every sequence has its own cache, whatever the architecture puts into one, and is computed
alone; so a row has the same tokens in any company. The prompt that a prefix group shares is
computed once, and its cache is copied for each member.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raybatch.backends.base import progress_of
from raybatch.backends.intake import IntakeBackend
from raybatch.backends.transformers.options import TransformersOptions
from raybatch.config import EngineConfig
from raybatch.engine.finish_rules import FinishRules, RowLimits
from raybatch.engine.loading.loaded_model import check_max_model_len, pick_device
from raybatch.engine.sampling.grammars import GrammarSlots
from raybatch.engine.sampling.sampler import Sampler
from raybatch.engine.sequences.table import completion_of
from raybatch.errors import ConfigError, UnreachableError, error_text
from raybatch.models.config import end_tokens
from raybatch.models.source import resolve_model
from raybatch.records.types import (
    Capacity,
    Completion,
    ReplicaStats,
    RowProgress,
    SequenceState,
    TokenIds,
)
from raybatch.text.detokenizer import StopChecker
from raybatch.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# of an argument of `forward` and a field of what it returns; state space models have no keys
_CACHE_NAMES = ("past_key_values", "cache_params", "state")
# of models that set no limit, such as state space models
_NO_LIMIT = 1 << 20


class HubModel:
    """One transformers model on one device; a sequence is its tokens and a cache of the model.

    Callers only pass the cache on: its type depends on the model.
    """

    def __init__(self, model: Any, max_model_len: int, path: Path) -> None:  # noqa: ANN401 - any
        config = model.config.get_text_config()
        self._model = model
        self.max_model_len = max_model_len
        self.vocab_size = int(config.vocab_size)
        of_config = getattr(config, "eos_token_id", None)
        self.eos_token_ids = end_tokens(path, of_config, below=self.vocab_size)
        names = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in names), "")
        if not self._cache_name:
            raise ConfigError(
                f"the transformers backend cannot run {type(model).__name__}, which keeps no KV "
                "cache or other state that it knows; choose a model that generates token by token"
            )
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    @classmethod
    def load(cls, path: Path, config: EngineConfig, options: TransformersOptions) -> HubModel:
        """Load a checkpoint; raise ConfigError if transformers can't load it with these options."""
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        device = pick_device(config)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        is_auto_on_cpu = config.dtype == "auto" and device.type == "cpu"
        disable_progress_bar()
        try:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                path,
                dtype="float32" if is_auto_on_cpu else config.dtype,
                attn_implementation=options.attn_implementation,
                trust_remote_code=options.trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            kind = UnreachableError if isinstance(error, OSError) else ConfigError
            raise kind(f"transformers cannot load {path}: {error_text(error)}") from error
        # transformers would draw them at random, and every answer would be wrong
        if missing := sorted(loaded["missing_keys"]):
            raise ConfigError(
                f"{path} lacks {len(missing)} tensors that {type(model).__name__} needs, the first "
                f"{missing[0]!r}; fetch the checkpoint again, or mend config.json"
            )
        model.to(device).eval()
        logger.info("%s loaded as %s on %s", type(model).__name__, model.dtype, device)
        text_config = model.config.get_text_config()
        model_len = getattr(text_config, "max_position_embeddings", None) or _NO_LIMIT
        check_max_model_len(config, model_len, path.name)
        return cls(model, config.max_model_len or model_len, path)

    @torch.inference_mode()
    def forward(self, token_ids: TokenIds, cache: Any) -> tuple[torch.Tensor, Any]:  # noqa: ANN401
        """Run the next tokens of a sequence, int32 [T] with T >= 1; `cache` has the tokens before.

        Return (float32 logits [V] after the last token, cache with the new tokens). Modifies
        `cache`; None begins a sequence.
        """
        ids = torch.from_numpy(token_ids.astype(np.int64))[None].to(self._model.device)
        state = {self._cache_name: cache}
        output = self._model(input_ids=ids, use_cache=True, **state, **self._options)
        return output.logits[0, -1].float(), output[self._cache_name]


# prefix groups whose cache is kept; groups come one after the other
_NUM_GROUPS = 2


@dataclass(slots=True, eq=False)
class _Running:
    state: SequenceState
    tokens: list[int]
    max_new_tokens: int
    num_cached_tokens: int
    logprobs: list[Any] | None
    num_reported: int
    # tokens that the cache does not hold yet
    pending: TokenIds
    cache: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.state.request.prompt_token_ids) + len(self.tokens)

    def exported(self) -> SequenceState:
        return replace(
            self.state,
            token_ids=np.array(self.tokens, np.int32),
            num_cached_tokens=self.num_cached_tokens,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
        )


class TransformersBackend(IntakeBackend):
    """Implements the `Backend` protocol with a transformers model.

    At most `max_num_seqs` sequences run at once; `sampler` must have as many slots.
    """

    def __init__(
        self, model: HubModel, sampler: Sampler, stop_checker: StopChecker, *, max_num_seqs: int
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._max_num_seqs = max_num_seqs
        self._limits = RowLimits(
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            kv_tokens=max_num_seqs * model.max_model_len,
        )
        self._rules = FinishRules(max_num_seqs, model.eos_token_ids, stop_checker)
        super().__init__()
        # by slot
        self._running: dict[int, _Running] = {}
        self._prefixes: OrderedDict[int, tuple[TokenIds, Any]] = OrderedDict()

    def capacity(self) -> Capacity:
        return Capacity(
            kv_tokens=self._limits.kv_tokens,
            max_model_len=self._limits.max_model_len,
            max_num_seqs=self._max_num_seqs,
            block_size=1,
        )

    def checkpoint(self, min_new_tokens: int) -> list[SequenceState]:
        states = []
        for running in self._running.values():
            if len(running.tokens) >= running.num_reported + min_new_tokens:
                running.num_reported = len(running.tokens)
                states.append(running.exported())
        return states

    def progress(self) -> RowProgress:
        return progress_of((r.state.request, len(r.tokens)) for r in self._running.values())

    def export(self, request_ids: Collection[int], *, with_kv: bool = False) -> list[SequenceState]:
        wanted = set(request_ids)
        slots = [s for s, r in self._running.items() if r.state.request.request_id in wanted]
        states = [self._leave(slot).exported() for slot in slots]
        return self._withdraw(wanted, states)

    def stats(self) -> ReplicaStats:
        held = sum(running.num_tokens for running in self._running.values())
        return ReplicaStats(
            **asdict(self._counters),
            num_running=len(self._running),
            num_waiting=self._num_waiting(),
            kv_used_fraction=held / self._limits.kv_tokens,
            kv_tokens=self._limits.kv_tokens,
        )

    def close(self) -> None:
        self._running.clear()
        self._prefixes.clear()
        self._forget_all()

    def _find_failure(self, state: SequenceState) -> Completion | None:
        refusal = self._sampler.refusal(state.request.sampling)
        return self._limits.find_failure(state, refusal=refusal)

    def _step(self) -> list[Completion]:
        free = [slot for slot in range(self._max_num_seqs) if slot not in self._running]
        for slot in free[: self._num_waiting()]:
            self._start(slot, *self._take_next())
        if not self._running:
            return []
        slots = np.array(list(self._running), np.int64)
        running = list(self._running.values())
        logits = []
        for each in running:
            after, each.cache = self._model.forward(each.pending, each.cache)
            logits.append(after)
        num_generated = np.array([len(each.tokens) for each in running], np.int64)
        result = self._sampler.sample(torch.stack(logits), slots, num_generated)
        self._counters.num_steps += 1
        self._counters.generated_tokens += int(result.is_finite.sum())
        completions = []
        for i in np.flatnonzero(~result.is_finite).tolist():
            num_tokens = running[i].num_tokens
            error = f"NonFiniteLogits: the model gave no finite logits after {num_tokens} tokens"
            self._leave(int(slots[i]))
            completions.append(completion_of(running[i].exported(), "error", error=error))
        good = np.flatnonzero(result.is_finite)
        for i in good.tolist():
            token_id = int(result.token_ids[i])
            running[i].tokens.append(token_id)
            running[i].pending = np.array([token_id], np.int32)
            logprobs = running[i].logprobs
            if logprobs is not None and result.logprobs is not None:
                logprobs.append(result.logprobs[i])
        ends = np.array([running[i].max_new_tokens for i in good], np.int64)
        finished = self._rules.find(
            slots[good], result.token_ids[good], num_generated[good] + 1, ends
        )
        for slot, reason, stop_reason in finished:
            completions.append(completion_of(self._leave(slot).exported(), reason, stop_reason))
        return completions

    def _start(self, slot: int, state: SequenceState, is_restored: bool) -> None:
        request = state.request
        prompt, sampling = request.prompt_token_ids, request.sampling
        running = _Running(
            state=state,
            tokens=state.token_ids.tolist(),
            max_new_tokens=min(sampling.max_tokens, self._limits.max_model_len - len(prompt)),
            num_cached_tokens=state.num_cached_tokens,
            logprobs=None if sampling.logprobs is None else list(state.logprobs or ()),
            num_reported=len(state.token_ids),
            pending=np.concatenate([prompt, state.token_ids]),
        )
        num_cached = self._take_prefix(running)
        if is_restored:
            self._counters.num_recomputed_tokens += len(running.pending)
        elif not state.sample_idx:
            running.num_cached_tokens = num_cached
            self._counters.prompt_tokens += len(prompt)
            self._counters.cached_tokens += num_cached
        self._running[slot] = running
        self._sampler.add(slot, sampling, request.seed, state.sample_idx, prompt, state.token_ids)
        self._rules.add(slot, sampling, prompt, state.token_ids)

    def _take_prefix(self, running: _Running) -> int:
        """Give a sequence the cache of its group's prefix; return the tokens another request made.

        One token at least is left, because the logits are those after the last one.
        """
        request = running.state.request
        length = min(request.prefix_len, len(request.prompt_token_ids) - 1)
        if request.group_id is None or length < 1:
            return 0
        prefix = request.prompt_token_ids[:length]
        known = self._prefixes.get(request.group_id)
        is_known = known is not None and np.array_equal(known[0], prefix)
        if known is None or not is_known:
            known = prefix, self._model.forward(prefix, None)[1]
            self._prefixes[request.group_id] = known
        self._prefixes.move_to_end(request.group_id)
        while len(self._prefixes) > _NUM_GROUPS:
            self._prefixes.popitem(last=False)
        running.cache = copy.deepcopy(known[1])
        running.pending = running.pending[length:]
        return length if is_known else 0

    def _leave(self, slot: int) -> _Running:
        self._sampler.remove(slot)
        self._rules.remove(slot)
        return self._running.pop(slot)


def create(model: str, options: TransformersOptions, engine: EngineConfig) -> TransformersBackend:
    """Load a model and return a backend that is ready for `submit`, or raise ConfigError.

    Of `engine`, only dtype, device, num_threads, max_model_len and max_num_seqs are used.
    """
    path = resolve_model(model)
    loaded = HubModel.load(path, engine, options)
    max_num_seqs = min(engine.max_num_seqs, options.max_num_seqs)
    load, eos_token_ids = cache(partial(Tokenizer.load, path)), loaded.eos_token_ids
    grammars = GrammarSlots(lambda: load().hugging_face, loaded.vocab_size, eos_token_ids)
    sampler = Sampler(loaded.vocab_size, max_num_seqs, eos_token_ids, grammars)
    return TransformersBackend(loaded, sampler, StopChecker(load), max_num_seqs=max_num_seqs)
