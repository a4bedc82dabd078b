"""What vLLM is given as its model, and which weights raybatch brings; nothing is fetched here."""

import pytest

from raybatch.backends.vllm.start import fetches_weights, model_for
from raybatch.errors import ConfigError

S3 = "s3://bucket/model"


@pytest.mark.parametrize(
    ("model", "load_format", "expected"),
    [
        (S3, None, True),
        (S3, "auto", True),
        (S3, "runai_streamer", False),
        ("gs://bucket/model", "runai_streamer_sharded", False),
        # it streams from a disk as well
        ("/models/a", "runai_streamer", True),
        ("Qwen/Qwen3-8B", "runai_streamer", True),
        # a file system that only fsspec knows
        ("memory://model", "runai_streamer", True),
        ("Qwen/Qwen3-8B", "tensorizer", False),
        ("Qwen/Qwen3-8B", "dummy", False),
    ],
)
def test_weights_are_brought_unless_vllm_reads_them_elsewhere(model, load_format, expected):
    assert fetches_weights(model, {"load_format": load_format}) == expected


@pytest.mark.parametrize("load_format", ["runai_streamer", "runai_streamer_sharded"])
def test_a_model_that_is_streamed_is_given_to_vllm_by_its_uri(load_format):
    options = {"concurrency": 16}
    kwargs = {"load_format": load_format, "model_loader_extra_config": options}
    assert model_for(S3, kwargs) == S3


def test_a_folder_needs_weights_where_vllm_reads_them_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_for(str(tmp_path), {"load_format": "dummy"}) == str(tmp_path)
    with pytest.raises(ConfigError, match="weights"):
        model_for(str(tmp_path), {"load_format": "runai_streamer"})
