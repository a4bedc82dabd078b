import models
import torch
from safetensors.torch import load_file

from raybatch.bench.checkpoints import Shape

TINY = Shape(
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    ffn_size=16,
    num_experts=4,
    experts_per_token=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=models.VOCAB_SIZE,
)


def test_every_token_id_decodes_and_text_survives():
    tokenizer = models.build_tokenizer()
    assert len(tokenizer) == models.VOCAB_SIZE
    text = "Any text: 12 ä \u4e2d\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert all(tokenizer.decode([i]) for i in range(models.VOCAB_SIZE))


def test_weights_depend_on_the_seed_alone(monkeypatch, tmp_path):
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)

    def weights(folder, seed):
        torch.rand(3)
        models.write("tiny", tmp_path / folder, seed)
        return load_file(tmp_path / folder / "model.safetensors")

    first, again, other = weights("first", 0), weights("again", 0), weights("other", 1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
