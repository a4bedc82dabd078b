"""Send a dataset to an endpoint with OpenAI's API.

The endpoint may be your own server (`vllm serve MODEL`, SGLang, a gateway) or a hosted model. No
GPU is reserved. One process holds hundreds of requests in flight, slows down when the endpoint
pushes back, and retries temporary failures. Rows with a common prefix are sent one after another,
so that the endpoint's prefix cache is used. With prices the report adds up the cost, and `max_cost`
ends the run before it exceeds a budget. Needs `pip install . ./raybatch-openai`.

    OPENAI_BASE_URL=https://api.openai.com/v1 MODEL=gpt-4.1-mini python examples/08_openai_endpoint.py
"""

import os

import pyarrow.parquet as pq

from raybatch import Job, LLMStage
from raybatch.demo.run import write_dataset

MODEL = os.environ.get("MODEL", "demo")  # as the endpoint names it
BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY_VARIABLE = "OPENAI_API_KEY"  # its value is never written
SOURCE = "examples-out/endpoint/prompts"
SINK = "examples-out/endpoint/answers"
PROMPT = "{document}\n\nQuestion: {question}"
SAMPLING = {"temperature": 0, "max_tokens": 64}
ENDPOINT = {
    "base_url": BASE_URL,
    "api_key_env": KEY_VARIABLE if KEY_VARIABLE in os.environ else None,
    "max_concurrency": 64,
    "price_per_million_input_tokens": 0.40,
    "price_per_million_output_tokens": 1.60,
}
LIMITS = {"max_cost": 5.0, "max_error_rate": 0.05}

# leave this out for your own files
write_dataset(
    SOURCE, num_documents=2, questions_per_document=4, seed=1, num_files=1, include_bad_rows=False
)

stage = LLMStage(
    MODEL, prompt=PROMPT, sampling=SAMPLING, backend={"kind": "openai", "options": ENDPOINT}
)
report = Job(SOURCE, SINK, stage, limits=LIMITS).run()

rows = pq.read_table(SINK).to_pylist()
for row in sorted(rows, key=lambda row: row["row_id"]):
    print(f"{row['question']} {row['generated_text'] or row['__inference_error__']}")
print(f"{report.prompt_tokens + report.generated_tokens} tokens cost {report.cost:.3f}")

# Output:
# To whom does the sword belong? not stated
# In which colour is the camera painted? turquoise
# On which day is the banquet? Sunday
# What colour is the bench? blue
# What is the job of Boris Berg? plumber
# Which food does Julia Winter like? waffles
# Where is the house of Igor Gale? Gold Bay
# To whom does the fiddle belong? Gina Olsen
# 1681 tokens cost 0.001
