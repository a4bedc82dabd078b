"""vLLM replicas that share feed-forward weights, through vLLM's hook for offloaded weights.

```
start      registers our loader under a separate load format
loader     sets our offloader, then loads as vLLM does     `DefaultModelLoader`
offloader  gets the layers as the model creates them       `BaseOffloader.wrap_modules`
loader     connects to the weights of the other ranks      `SharedModules.finish`
steps      feed-forward modules wait for their slot, then compute as usual
```

An engine that shares weights uses one GPU, so engine and worker are in this process. The link to
the other ranks is therefore an object, and no setting of vLLM.

This has never run on a GPU. On CPUs the kernels of vLLM change the weight layout, so shared linears
use plain products of torch instead, and mixtures of experts are refused.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raybatch.backends.vllm.adapter import Adapter
from raybatch.config import EngineConfig
from raybatch.engine.weights.layer_store import ShardBufferPool
from raybatch.engine.weights.weight_buffers import WeightCounters
from raybatch.errors import ConfigError
from raybatch.models.checkpoint import model_fingerprint
from raybatch.records.share import ShareLink
from raybatch_extensions.sharing.modules import SharedModules

# name of our loader in vLLM's registry
LOAD_FORMAT = "raybatch_shared"

_logger = logging.getLogger("raybatch.extensions.sharing.vllm")


class VllmShare:
    """Makes the next engine of vLLM in this process share weights with other ranks.

    Args:
        link: connects the ranks.
        engine: gives the number of weight buffers and the device.
    """

    def __init__(self, link: ShareLink, engine: EngineConfig, adapter: Adapter) -> None:
        self._link = link
        self._num_slots = engine.explicit_buffers
        self._device = torch.device(engine.device if engine.device != "auto" else "cpu")
        self._vllm = adapter.load("sharing")
        self._is_cpu = self._vllm.current_platform.is_cpu()
        self._modules: SharedModules | None = None
        # set when the engine starts
        self.buffers: ShardBufferPool[dict[str, torch.Tensor]] | None = None

    def arguments(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Register raybatch's model loader with vLLM; return `args` changed so that it is used."""
        loader = self._loader(args.get("load_format") or "auto")
        self._vllm.register_model_loader(LOAD_FORMAT)(loader)
        changed = {"load_format": LOAD_FORMAT, "enforce_eager": True}
        if not self._is_cpu and args.get("moe_backend", "auto") == "auto":
            # other kernels change the layout of experts
            changed["moe_backend"] = "triton"
        return {**args, **changed}

    def settle(self, config: Any) -> None:  # noqa: ANN401 - `VllmConfig`
        """Set the device in vLLM's config; raise ConfigError if the engine cannot share weights."""
        if (reason := _why_not(config, is_cpu=self._is_cpu)) is not None:
            raise ConfigError(f"engine.weights='shared': {reason}; leave engine.weights out")
        if self._is_cpu:
            _logger.warning(
                "engine.weights='shared' does not use the kernels of vLLM for shared weights on a "
                "CPU; it is meant for GPUs and tests"
            )
        if self._device.index is not None:
            # vLLM takes the local rank from it
            config.device_config.device = self._device

    @property
    def counters(self) -> WeightCounters:
        """Counters of weight copies since the engine started."""
        return WeightCounters() if self.buffers is None else self.buffers.counters

    def close(self) -> None:
        """Stop copying weights."""
        if self.buffers is not None:
            self.buffers.close()

    def take(self, layers: Iterable[nn.Module]) -> list[nn.Module]:
        """Build the layers of the model so that they can share weights, and return them.

        `layers` builds them lazily. Raises ConfigError if the model has a second stack of layers.
        """
        if self._modules is not None:
            raise ConfigError(
                "engine.weights='shared': the model has more than one stack of layers; leave "
                "engine.weights out"
            )
        self._modules = SharedModules(self._link, layers, num_slots=self._num_slots)
        if self._is_cpu:
            for module in self._modules.blocks:
                _leave_as_loaded(module)
        return self._modules.layers

    def finish(self, model: str) -> None:
        """Connect to the weights of the other ranks, after this rank has loaded its own."""
        if self._modules is None:
            raise ConfigError(
                "engine.weights='shared': vLLM creates the layers of this model without the hook "
                "that sharing needs; leave engine.weights out"
            )
        self.buffers = self._modules.finish(model_fingerprint(Path(model)))

    def _loader(self, load_format: str) -> type:
        """Return the loader class for vLLM."""
        share, vllm = self, self._vllm

        class SharingOffloader(vllm.BaseOffloader):  # type: ignore[misc, name-defined]
            def wrap_modules(
                self, modules_generator: Iterable[nn.Module], prefix: str = ""
            ) -> list[nn.Module]:
                return share.take(modules_generator)

        class SharingLoader(vllm.DefaultModelLoader):  # type: ignore[misc, name-defined]
            def __init__(self, load_config: Any) -> None:  # noqa: ANN401 - vLLM's
                super().__init__(replace(load_config, load_format=load_format))

            def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:  # noqa: ANN401
                vllm.set_offloader(SharingOffloader())
                model = super().load_model(vllm_config, model_config, prefix)
                share.finish(model_config.model)
                return model

        return SharingLoader


def _why_not(config: Any, *, is_cpu: bool) -> str | None:  # noqa: ANN401
    """Return why an engine of this config cannot share weights; None where it can."""
    if config.quant_config is not None:
        name = config.quant_config.get_name()
        return f"vLLM changes the weight layout of quantized models, here by {name!r}"
    if is_cpu and config.model_config.is_moe:
        return "the CPU kernels of vLLM change the layout of experts"
    return None


def _leave_as_loaded(module: nn.Module) -> None:
    """Make vLLM's linears keep the loaded weight layout on a CPU."""
    for linear in module.modules():
        linear._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
