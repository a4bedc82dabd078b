"""Writes the trained model as a Hugging Face checkpoint, and measures it with transformers."""

import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from demo_training.model import DemoModel, ModelShape
from demo_training.tokenizer import END, PAD
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from raybatch.demo.run import MAX_FACTS, MIN_FACTS
from raybatch.demo.task import PROMPT, Question, make_document, make_questions

MAX_CHECKPOINT_BYTES = 8_000_000


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Questions and exact matches by kind of question, and one wrong answer of each kind."""

    asked: Mapping[str, int]
    right: Mapping[str, int]
    mistakes: Mapping[str, str]

    @property
    def fraction(self) -> float:
        """Share of right answers over all kinds."""
        return sum(self.right.values()) / sum(self.asked.values())


def write_checkpoint(model: DemoModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bf16, configs and tokenizer; the checkpoint needs no custom code."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(_standard_tensors(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    size = weights.stat().st_size
    if size > MAX_CHECKPOINT_BYTES:
        raise ValueError(f"{weights} has {size} bytes, more than {MAX_CHECKPOINT_BYTES}")
    tokenizer.save_pretrained(folder)
    # both transformers 4 and 5 know this class name
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    _write_json(folder / "config.json", _config(model.shape, end, pad))
    generation = {
        "do_sample": False,
        "eos_token_id": end,
        "max_new_tokens": 64,
        "pad_token_id": pad,
    }
    _write_json(folder / "generation_config.json", generation)


def read_weights(model: DemoModel, folder: Path) -> None:
    """Load the weights of a checkpoint into the training model."""
    tensors = load_file(folder / "model.safetensors")
    state = {
        name: torch.cat([tensors[part] for part in _standard_names(name)]).float()
        for name in model.state_dict()
    }
    model.load_state_dict(state)


def measure_accuracy(folder: Path, *, num_documents: int, seed: int) -> Accuracy:
    """Answer questions over unseen documents with transformers, greedily, in float32.

    Args:
        folder: The checkpoint.
        num_documents: Documents to draw; 20 questions are asked about each.
        seed: Seed of the documents; must differ from the training seed.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = random.Random(seed)
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    mistakes: dict[str, str] = {}
    for _ in range(num_documents):
        document = make_document(rng, rng.randint(MIN_FACTS, MAX_FACTS))
        questions = make_questions(document, rng, 20)
        for question, text in zip(
            questions, _answer(model, tokenizer, document.text, questions), strict=True
        ):
            asked[question.kind] += 1
            right[question.kind] += text.strip() == question.answer
            if text.strip() != question.answer:
                mistakes[question.kind] = f"{question.answer!r} became {text!r}"
    return Accuracy(asked, right, mistakes)


def _answer(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    document: str,
    questions: tuple[Question, ...],
) -> list[str]:
    chats = [
        [{"role": "user", "content": PROMPT.format(document=document, question=question.text)}]
        for question in questions
    ]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        out = model.generate(**inputs)
    new = out[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def _standard_tensors(model: DemoModel) -> dict[str, Tensor]:
    """Return the tensors under the names of public Qwen3-MoE checkpoints, one per projection."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        names = _standard_names(name)
        tensors.update(zip(names, tensor.chunk(len(names)), strict=True))
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def _standard_names(name: str) -> tuple[str, ...]:
    """Return the names of a training tensor in the checkpoint; gate and up become two tensors."""
    head, _, expert = name.rpartition(".")
    if head.endswith("gate_up_proj"):
        prefix = f"model.{head.removesuffix('gate_up_proj')}experts.{expert}"
        return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"
    if head.endswith("down_proj"):
        return (f"model.{head.removesuffix('down_proj')}experts.{expert}.down_proj.weight",)
    return (f"model.{name}",)


def _config(shape: ModelShape, end: int, pad: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": end,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size": shape.moe_intermediate_size,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "output_router_logits": False,
        "pad_token_id": pad,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    } | asdict(shape)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
