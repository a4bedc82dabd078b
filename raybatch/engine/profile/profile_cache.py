"""Profiles of models on disk: measured once on a kind of host, then read."""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from raybatch.config import cache_dir
from raybatch.engine.profile.cached_file import cpu_name, versions, write_cached
from raybatch.engine.profile.layer_bench import ProfileOptions
from raybatch.engine.profile.module_profile import ModuleProfile, profile_layer
from raybatch.engine.weights.loading import ModelWeights
from raybatch.errors import ConfigError, error_text
from raybatch.models.config import ModelSpec
from raybatch.policy.batches.layer_plan import LayerShape, ModelShape
from raybatch.policy.batches.step_plan import MeasuredLayer
from raybatch.policy.cost.roofline import MeasuredWork, Work

_FOLDER = "batch-plans"

_logger = logging.getLogger(__name__)


def measured_profile(
    spec: ModelSpec,
    weights: ModelWeights,
    options: ProfileOptions | None = None,
    *,
    fresh: bool = False,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
    measure: Callable[..., ModuleProfile] = profile_layer,
) -> tuple[ModuleProfile, bool]:
    """Return the profile of a model on this host, and whether it was read and not measured.

    `fresh` measures also where a profile is there, and puts the new one in its place; a `folder` of
    None is `batch-plans` below the cache folder; `tell` is called with what is measured next.
    """
    options = options or ProfileOptions()
    path = profile_path(spec, weights.embed.dtype, weights.embed.device, options, folder=folder)
    cached = None if fresh else load_profile(path)
    if cached is not None:
        return cached, True
    _logger.info(
        "measuring what layers cost here, about %.0f s; this happens once", options.budget_s
    )
    profile = measure(spec, weights, options, tell=tell)
    write_cached(path, json.dumps(asdict(profile), indent=1), what="profile of the model")
    return profile, False


def profile_path(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    options: ProfileOptions,
    *,
    folder: Path | None = None,
) -> Path:
    """Return the file of a profile; its name is a hash of all that it depends on.

    That is the model's shapes and not its weights, so that models of one shape share a file.
    """
    folder = cache_dir() / _FOLDER if folder is None else folder
    is_cpu = device.type == "cpu"
    described = {
        "spec": asdict(spec),
        "dtype": str(dtype),
        "device": cpu_name() if is_cpu else torch.cuda.get_device_name(device),
        "num_threads": torch.get_num_threads() if is_cpu else None,
        "versions": versions(("raybatch", "torch")),
        "options": asdict(options),
    }
    text = json.dumps(described, sort_keys=True, default=repr)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def load_profile(path: Path) -> ModuleProfile | None:
    """Read a profile; None if there is none, or a broken one, which is warned about."""
    try:
        profile = _from_json(json.loads(path.read_text(encoding="utf-8")))
        # what cannot be fitted was never measured
        profile.costs()
        return profile
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        _logger.warning(
            "the profile %s cannot be read and is measured again: %s", path, error_text(error)
        )
        return None


def _from_json(fields: dict[str, Any]) -> ModuleProfile:
    model = fields["model"]
    runs = {
        name: tuple(
            MeasuredWork(
                tokens=int(run["tokens"]), work=Work(**run["work"]), seconds=float(run["seconds"])
            )
            for run in fields[name]
        )
        for name in ("attention", "ffn", "to_device", "to_host")
    }
    return ModuleProfile(
        model=ModelShape(**{**model, "layer": LayerShape(**model["layer"])}),
        layers=tuple(MeasuredLayer(**layer) for layer in fields["layers"]),
        copies_overlap=bool(fields["copies_overlap"]),
        **runs,
    )
