"""Replicas of vLLM that share feed-forward weights, by vLLM's hook for weights that come and go.

```
start      a loader of ours, under a load format of its own
loader     sets an offloader of ours, loads as vLLM does          `DefaultModelLoader`
offloader  takes the layers as the model makes them               `BaseOffloader.wrap_modules`
loader     reaches the weights of the others, when all is loaded  `SharedModules.finish`
steps      feed-forward modules wait for their slot, and compute as ever
```

Engine and worker are in this process, since an engine that shares weights computes on one GPU: so
the link to the others is an object, and vLLM reads no setting of it.

It has never run on a GPU. It has run on CPUs, where the kernels of vLLM lay weights out anew: of
modules that are shared, linears multiply with plain products of torch instead, and mixtures of
experts are refused.
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
from raybatch.engine.ext.sharing.modules import SharedModules
from raybatch.engine.weights.tile_ring import TileRing
from raybatch.engine.weights.weight_ring import WeightCounters
from raybatch.errors import ConfigError
from raybatch.models.checkpoint import model_fingerprint
from raybatch.records.share import ShareLink

# of the loader, in vLLM's table of them
LOAD_FORMAT = "raybatch_shared"

_logger = logging.getLogger(__name__)


class VllmShare:
    """How the next engine of vLLM in this process shares weights with others.

    Args:
        link: to the others.
        engine: for the number of slots and the device.
    """

    def __init__(self, link: ShareLink, engine: EngineConfig, adapter: Adapter) -> None:
        self._link = link
        self._num_slots = engine.given_buffers
        self._device = torch.device(engine.device if engine.device != "auto" else "cpu")
        self._vllm = adapter.load("sharing")
        self._is_cpu = self._vllm.current_platform.is_cpu()
        self._modules: SharedModules | None = None
        # once the engine has started
        self.ring: TileRing[dict[str, torch.Tensor]] | None = None

    def arguments(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of `EngineArgs` with which the engine shares weights."""
        loader = self._loader(args.get("load_format") or "auto")
        self._vllm.register_model_loader(LOAD_FORMAT)(loader)
        changed = {"load_format": LOAD_FORMAT, "enforce_eager": True}
        if not self._is_cpu and args.get("moe_backend", "auto") == "auto":
            # others lay experts out anew
            changed["moe_backend"] = "triton"
        return {**args, **changed}

    def settle(self, config: Any) -> None:  # noqa: ANN401 - `VllmConfig`
        """Choose the device, among those of the group; ConfigError for what cannot be shared."""
        if (reason := _why_not(config, is_cpu=self._is_cpu)) is not None:
            raise ConfigError(f"engine.weights='shared': {reason}; leave engine.weights out")
        if self._is_cpu:
            _logger.warning(
                "engine.weights='shared': on a CPU the kernels of vLLM are not used where weights "
                "are shared; it is for GPUs, and for tests"
            )
        if self._device.index is not None:
            # which vLLM takes the rank on this host from
            config.device_config.device = self._device

    @property
    def counters(self) -> WeightCounters:
        """What was copied since the engine has started."""
        return WeightCounters() if self.ring is None else self.ring.counters

    def close(self) -> None:
        """Copy nothing any more."""
        if self.ring is not None:
            self.ring.close()

    def take(self, layers: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the layers of the model; there is one stack of them."""
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
        """Reach the weights of the others, once those of this rank are loaded."""
        if self._modules is None:
            raise ConfigError(
                "engine.weights='shared': vLLM makes the layers of this model by themselves, where "
                "they cannot be shared; leave engine.weights out"
            )
        self.ring = self._modules.finish(model_fingerprint(Path(model)))

    def _loader(self, load_format: str) -> type:
        """Return a class that vLLM makes the loader of."""
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
        return f"vLLM lays weights out anew where the model is quantized, here by {name!r}"
    if is_cpu and config.model_config.is_moe:
        return "the kernels of vLLM for CPUs lay experts out anew"
    return None


def _leave_as_loaded(module: nn.Module) -> None:
    """Have vLLM's linears multiply with their weight as it is, on a CPU."""
    for linear in module.modules():
        linear._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
