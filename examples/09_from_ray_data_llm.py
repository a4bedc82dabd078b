"""Run a script that was written for ray.data.llm.

Only the import changes: configuration, columns, the call, `preprocess` and `postprocess` keep their
names. `ProcessorConfig` uses the native engine; `vLLMEngineProcessorConfig` uses vLLM with all its
`engine_kwargs`. For differences see docs/how-to/move-from-ray-data-llm.md. The demo model reads a
color from a title.

    python examples/09_from_ray_data_llm.py
"""

import os

import ray

# from ray.data.llm import build_processor
from raybatch.llm import ProcessorConfig, build_processor

MODEL = os.environ.get("MODEL", "demo")  # or a hub id, a checkpoint folder, a URI
SAMPLING = {"temperature": 0.0, "max_tokens": 16}
PROMPT = "{title}\n\nQuestion: What colour is the {thing}?"

# leave this out for your own data
TITLES = [
    ("lamp", "The lamp is painted violet. The lamp costs 45 coins. The fair is on Friday."),
    ("kettle", "You can find the kettle in drawer 31. The colour of the kettle is blue."),
    ("tent", "The tent belongs to Ada Reed. The surface of the tent is orange."),
]
ds = ray.data.from_items(
    [{"sku": i, "thing": thing, "title": title} for i, (thing, title) in enumerate(TITLES)]
)

processor = build_processor(
    ProcessorConfig(model_source=MODEL, concurrency=1),
    preprocess=lambda row: {
        "messages": [{"role": "user", "content": PROMPT.format_map(row)}],
        "sampling_params": SAMPLING,
    },
    postprocess=lambda row: {**row, "colour": row["generated_text"]},
)

for row in sorted(processor(ds).take_all(), key=lambda row: row["sku"]):
    print(f"{row['sku']}: the {row['thing']} is {row['colour']}")

# Output:
# 0: the lamp is violet
# 1: the kettle is blue
# 2: the tent is orange
