"""A tiny random model that reads images, and images without a library."""

import base64
import struct
import zlib
from pathlib import Path

import numpy as np

from tests.stages.support import make_tokenizer

IMAGE = "<image>"
_SIZE = 28
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def png(seed: int, width: int = 56, height: int = 56) -> bytes:
    """Return the file of an image of noise."""
    chance = np.random.Generator(np.random.PCG64(seed))
    rows = chance.integers(0, 256, (height, 3 * width), np.uint8)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def asking(text: str, *images: bytes) -> list[dict]:
    """Return messages that show images before a text."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def save_image_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of bytes with a place for images in its chat template."""
    from transformers import AutoTokenizer

    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = [IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.pad_token = "<|eos|>"
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def save_image_model(folder: Path) -> Path:
    """Write an Idefics3 with two layers, whose processor needs no torchvision."""
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    save_image_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * _SIZE}, max_image_size={"longest_edge": _SIZE}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=_TEMPLATE,
    )
    processor.save_pretrained(folder)
    shape = {"intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 0,
        **shape,
    }
    config = Idefics3Config(
        vision_config={"hidden_size": 32, "image_size": _SIZE, "patch_size": 7, **shape},
        text_config=text,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    for part in (model.model.vision_model, model.model.connector):
        for weights in part.parameters():
            torch.nn.init.normal_(weights, 0, 0.3)
    model.generation_config.eos_token_id = 256
    model.save_pretrained(folder)
    return folder
