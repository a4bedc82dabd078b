"""What a model needs of its checkpoint, against what the recipes read and transformers writes."""

import pytest

from raybatch.engine.weights.loading import recipes_of
from raybatch.models.checkpoint import Checkpoint, check_tensors, needed_tensors, stored_tensors
from raybatch.models.config import read_model_spec
from tests.engine.tiny_models import VARIANTS, build


class Recorded(Checkpoint):
    """Notes the shapes of the tensors that are read."""

    def __init__(self, path):
        super().__init__(path)
        self.read = {}

    def get(self, name):
        tensor = super().get(name)
        self.read[name] = tuple(tensor.shape)
        return tensor


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_needs_what_its_recipes_read(variant, tmp_path):
    build(variant).save_pretrained(tmp_path, max_shard_size="40KB")
    spec = read_model_spec(tmp_path)
    check_tensors(tmp_path, spec)
    with Recorded(tmp_path) as checkpoint:
        for shape, make in recipes_of(checkpoint, spec).values():
            assert shape == tuple(make().shape)
        read = checkpoint.read
    assert read == needed_tensors(spec, stored_tensors(tmp_path))
