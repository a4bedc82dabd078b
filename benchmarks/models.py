"""Writes Qwen3 and Qwen3-MoE checkpoints with random weights, which every peer can load.

python benchmarks/models.py moe-8m FOLDER            writes one checkpoint
python benchmarks/models.py moe-8m FOLDER --check    also measures its greedy outputs

The tokenizer is byte-level. Weights are those of `raybatch.bench.checkpoints`, which vary outputs
enough that equal tokens of two engines are evidence.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybatch.bench.checkpoints import Shape, write_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# pairs of these become the tokens above the single bytes, so that every id decodes to text
PAIR_CHARACTERS = "abcdefghijklmnopqrstuvwxyz\u0120."
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_shape = partial(Shape, num_kv_heads=4, head_dim=64, vocab_size=VOCAB_SIZE, max_len=8192)
SHAPES = {
    "dense-4m": _shape(hidden_size=256, num_layers=4, num_heads=8, ffn_size=512),
    "dense-60m": _shape(hidden_size=768, num_layers=10, num_heads=12, ffn_size=2048),
    "dense-180m": _shape(hidden_size=1024, num_layers=16, num_heads=16, ffn_size=2816),
    "moe-8m": _shape(
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        ffn_size=128,
        num_experts=16,
        experts_per_token=4,
    ),
    "moe-100m": _shape(
        hidden_size=512,
        num_layers=5,
        num_heads=8,
        ffn_size=192,
        num_experts=64,
        experts_per_token=8,
    ),
}
# models with other layers, widths, heads and experts, on which nothing was tuned
HELD_OUT = {
    "dense-9m": _shape(hidden_size=320, num_layers=6, num_heads=10, num_kv_heads=2, ffn_size=896),
    "dense-22m": _shape(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=8, ffn_size=1024),
    "dense-29m": _shape(hidden_size=640, num_layers=6, num_heads=10, num_kv_heads=5, ffn_size=1792),
    "moe-11m": _shape(
        hidden_size=256,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=256,
        num_experts=8,
        experts_per_token=2,
    ),
    "moe-20m": _shape(
        hidden_size=384,
        num_layers=5,
        num_heads=6,
        num_kv_heads=2,
        ffn_size=96,
        num_experts=32,
        experts_per_token=4,
    ),
    "moe-42m": _shape(
        hidden_size=384,
        num_layers=4,
        num_heads=12,
        ffn_size=64,
        num_experts=128,
        experts_per_token=8,
    ),
}
SHAPES |= HELD_OUT


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Build a byte-level BPE whose merges join two characters of `PAIR_CHARACTERS`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_pairs = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet)
    pairs = [(left, right) for left in PAIR_CHARACTERS for right in PAIR_CHARACTERS][:num_pairs]
    words = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in pairs)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[2], pad_token=SPECIAL_TOKENS[0]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def check(folder: Path, num_prompts: int = 8, output_len: int = 64) -> dict[str, float]:
    """Measure greedy outputs: variety of tokens, and gaps between the two best logits of a step.

    The gaps are in standard deviations of that step's logits.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from workloads_e2e import Workload, build

    workload = Workload(
        name="check", kind="random", num_requests=num_prompts, prompt_len=128, output_len=output_len
    )
    prompts = torch.tensor([request.prompt_ids for request in build(workload)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        outputs = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=output_len,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    logits = torch.stack(outputs.logits)
    best = logits.topk(2, dim=-1).values
    margins = (best[..., 0] - best[..., 1]) / logits.std(dim=-1)
    tokens = outputs.sequences[:, prompts.shape[1] :]
    distinct = [len(set(row.tolist())) / output_len for row in tokens]
    return {
        "distinct_fraction": sum(distinct) / len(distinct),
        "distinct_rows": len({tuple(row.tolist()) for row in tokens}) / num_prompts,
        "median_margin_std": margins.median().item(),
        "smallest_margin_std": margins.min().item(),
    }


def write(name: str, folder: Path, seed: int = 0) -> int:
    """Write checkpoint and tokenizer into `folder`; return the number of parameters."""
    return write_checkpoint(SHAPES[name], folder, seed=seed, tokenizer=build_tokenizer())


def main() -> None:
    """Write the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description="Write a random-weight checkpoint.")
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="also measure its greedy outputs")
    args = parser.parse_args()
    num_parameters = write(args.name, args.folder, args.seed)
    print(json.dumps({"model": args.name, "num_parameters": num_parameters}))
    if args.check:
        print(json.dumps(check(args.folder)))


if __name__ == "__main__":
    main()
