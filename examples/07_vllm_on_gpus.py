"""Run a job with vLLM on the GPUs of this host or of a Ray cluster.

vLLM runs inside the engine actors; raybatch plans the rows, feeds all engines from one queue and
writes the output. `engine_kwargs` accepts vLLM's `EngineArgs`. Without `replicas` there is one
engine per `tensor_parallel_size` GPUs: 8 GPUs run 4 engines here. Run `--check` first: it reads the
input, makes the plan and prints the shared prefixes, on any machine with the model's tokenizer and
without a GPU. Nothing of raybatch has run on a GPU yet (docs/start/on-gpus.md), so check some
answers before a long run. Needs the extra `vllm`
(`pip install '.[vllm]'`) on hosts with GPUs.

    python examples/07_vllm_on_gpus.py --check
    python examples/07_vllm_on_gpus.py
"""

import os
import sys

from raybatch import Job, LLMStage
from raybatch.demo.run import write_dataset

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-8B")  # or a checkpoint folder, a URI
SOURCE = "examples-out/vllm/prompts"  # a file, a folder or a glob; a path or a URI
SINK = "examples-out/vllm/answers"
PROMPT = "{document}\n\nQuestion: {question}"
SAMPLING = {"temperature": 0, "max_tokens": 64}
ENGINE_KWARGS = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.9}
ENGINE = {"max_model_len": 2048}
POOL = {"replicas": None}  # or a number of engines
LIMITS = {"max_wall_s": 3600}  # a stopped run resumes when it is started again

# leave this out for your own files
write_dataset(
    SOURCE, num_documents=64, questions_per_document=16, seed=1, num_files=2, include_bad_rows=False
)

stage = LLMStage(
    MODEL,
    prompt=PROMPT,
    sampling=SAMPLING,
    engine=ENGINE,
    pool=POOL,
    backend={"kind": "vllm", "options": {"engine_kwargs": ENGINE_KWARGS}},
)
job = Job(SOURCE, SINK, stage, limits=LIMITS)

if "--check" in sys.argv:
    print(job.explain(measure=False))
else:
    print(job.run())

# Output:
# raybatch explain: examples-out/vllm/prompts with demo
# rows        1,024 in the source, 1,024 for the engines, 1 copy of other rows among them (not generated again)
# prompts     255 k tokens, 249 a row (half of them up to 247, 95 % up to 318, longest 347)
# outputs     65.5 k tokens expected (from max_tokens), at most 65.5 k
# sharing     81 prefixes; a row has 209 tokens in them and 41 unshared; 15.0 rows share a token, identical rows included
# plan        66 groups in order 'auto', 1 unit of commit, 0 rows in no group
# group size  15.5 rows on average, half of the groups up to 16, largest 16
# backend     vllm
# time        no cost model: this model has not been measured on this host
# executor    local, because no cluster is connected, and the input is small
# hit rate    77.6 % of the prompt tokens need no computing when each prefix runs once, 78.2 % at most
#             the size of the KV cache is unknown, so orders are not compared
