"""Puts the layers of a loaded model where its residence says, and tells what that costs."""

import logging

from raybatch.engine.loading.loaded_model import LoadedModel
from raybatch.engine.weights.layer_store import LayerStore, ResidentLayers, StreamedLayers
from raybatch.policy.residence import pass_time

_logger = logging.getLogger(__name__)


def place_layers(model: LoadedModel) -> LayerStore:
    """Return the layers of a model, as the decoder uses them; the log says what is streamed."""
    residence, sizes = model.residence, model.sizes
    if not residence.streamed:
        return ResidentLayers(model.weights.layers)
    layers = StreamedLayers(model.weights.layers, residence, model.device)
    bytes_per_s = layers.bytes_per_s()
    # without computations, behind which a GPU hides copies
    longest_s = pass_time(
        residence,
        sizes,
        layer_s=[0.0] * len(sizes.layer_bytes),
        bytes_per_s=bytes_per_s,
        copies_overlap=model.device.type == "cuda",
    )
    _logger.info(
        "%s keeps %d of %d layers on the device, in %.1f of %.1f MB of weights; the others pass "
        "through %d buffers: every step copies %.1f MB, at %.1f GB/s, and takes %s%.2f ms longer "
        "for that",
        model.name,
        sum(residence.is_resident),
        len(residence.is_resident),
        residence.device_bytes / 1e6,
        sizes.total_bytes / 1e6,
        residence.num_buffers,
        residence.pass_bytes / 1e6,
        bytes_per_s / 1e9,
        "up to " if model.device.type == "cuda" else "",
        1e3 * longest_s,
    )
    return layers
