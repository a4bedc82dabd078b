"""Engines of vLLM that are started once and reused by one backend after the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from raybatch.backends.vllm.backend import VllmBackend
from raybatch.backends.vllm.requests import InnerEngine
from raybatch.backends.vllm.start import start_inner
from raybatch.config import BackendConfig, EngineConfig
from tests.engine.tiny_models import build
from tests.stages.support import make_tokenizer

# the smallest block of vLLM on a CPU
BLOCK_TOKENS = 32
# prompt and output position at which the model of `save_text_model` generates its end token
PROMPT = [72, 101, 108, 108, 111]
EOS_PLACE = 9


def save_text_model(folder: Path) -> Path:
    """Write a small random model with a tokenizer of bytes.

    Its end token is the one that it generates at `EOS_PLACE` after `PROMPT`.
    """
    make_tokenizer(folder, has_chat_template=False)
    model = build("qwen3", vocab_size=260)
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=EOS_PLACE + 1, do_sample=False
        )
    model.config.eos_token_id = model.generation_config.eos_token_id = int(tokens[0, -1])
    model.save_pretrained(folder)
    return folder


def start_tiny(folder: Path, *, num_blocks: int, **options: Any) -> InnerEngine:
    """Start vLLM on a checkpoint, with `num_blocks` blocks of KV."""
    kwargs = {"num_gpu_blocks_override": num_blocks, "seed": 0}
    engine = EngineConfig(
        **{"block_size_tokens": BLOCK_TOKENS, "dtype": "float32", "max_num_seqs": 8} | options
    )
    backend = BackendConfig(kind="vllm", options={"engine_kwargs": kwargs})
    return start_inner(str(folder), backend, engine)


class _Lent:
    """Forwards to an engine; `close` empties the engine for reuse."""

    def __init__(self, engine: Any, idle: list[Any]) -> None:
        self._engine = engine
        self._idle = idle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        self._engine.reset()
        self._idle.append(self._engine)


class VllmShelf:
    """Makes backends over idle engines, and starts an engine if none is idle.

    A process may hold several engines of vLLM, but closing one ends state that they share.
    """

    def __init__(self, start: Callable[[], InnerEngine]) -> None:
        self._start = start
        self._idle: list[Any] = []

    def make(self) -> VllmBackend:
        engine = self._idle.pop() if self._idle else self._start()
        return VllmBackend(_Lent(engine, self._idle))
