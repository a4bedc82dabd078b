"""A causal language model of transformers: its weights, its logits and its config."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raybatch.backends.transformers.type import TransformersOptions
from raybatch.config import EngineConfig
from raybatch.engine.loading.resolve import check_max_model_len, pick_device
from raybatch.errors import ConfigError, UnreachableError, error_text
from raybatch.models.config import merge_eos
from raybatch.records.types import TokenIds

logger = logging.getLogger(__name__)

# of an argument of `forward` and a field of what it returns; state space models have no keys
_CACHE_NAMES = ("past_key_values", "cache_params", "state")
# of models that set no limit, such as state space models
_NO_LIMIT = 1 << 20


class HubModel:
    """One model on one device; a sequence is its tokens and a cache that only the model reads.

    Args:
        model: of transformers, ready for inference.
        max_model_len: longest prompt plus output, in tokens.
    """

    def __init__(self, model: Any, max_model_len: int) -> None:  # noqa: ANN401 - of any class
        config = model.config.get_text_config()
        self._model = model
        self.max_model_len = max_model_len
        self.vocab_size = int(config.vocab_size)
        self.eos_token_ids = _eos_token_ids(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in names), "")
        if not self._cache_name:
            raise ConfigError(
                f"{type(model).__name__} keeps no state from token to token that is known here; "
                "only models that generate one token after the other can be run"
            )
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    @classmethod
    def load(cls, path: Path, config: EngineConfig, options: TransformersOptions) -> HubModel:
        """Load a checkpoint.

        Args:
            config: dtype, device, threads and the longest sequence are taken from it.

        Raises:
            ConfigError: transformers cannot load it, or an option cannot be had.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        device = pick_device(config)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        dtype: Any = config.dtype
        if dtype == "auto" and device.type == "cpu":
            dtype = "float32"
        disable_progress_bar()
        try:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
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
        model_len = (
            getattr(model.config.get_text_config(), "max_position_embeddings", None) or _NO_LIMIT
        )
        check_max_model_len(config, model_len, path.name)
        return cls(model, config.max_model_len or model_len)

    @torch.inference_mode()
    def forward(self, token_ids: TokenIds, cache: Any) -> tuple[torch.Tensor, Any]:  # noqa: ANN401
        """Append tokens to a sequence.

        Args:
            token_ids: int32 [T], T at least 1.
            cache: of the tokens before, which is changed; None for none.

        Returns:
            Float32 logits [V] after the last token, and the cache with the new tokens.
        """
        ids = torch.from_numpy(token_ids.astype(np.int64))[None].to(self._model.device)
        state = {self._cache_name: cache}
        output = self._model(input_ids=ids, use_cache=True, **state, **self._options)
        return output.logits[0, -1].float(), output[self._cache_name]


def _eos_token_ids(model: Any) -> tuple[int, ...]:  # noqa: ANN401
    sources = (model.config.get_text_config(), model.generation_config)
    return merge_eos(*(getattr(source, "eos_token_id", None) for source in sources))
