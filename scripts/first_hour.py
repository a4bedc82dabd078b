"""Runs the first hour of a new user with a cluster, on a slow S3 and models with random weights.

python scripts/first_hour.py                 # some minutes, two cores
python scripts/first_hour.py --delay-ms 20 --files 200

The S3 is a moto server on this host that delays each response. The Ray cluster consists of
processes on this host: a head without GPUs, and nodes with fake GPUs that the autoscaler adds when
engines ask for them. The output lists minutes of the hour: what the user does, and what is checked.
The first check that fails ends the run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import yaml

from faultlab.s3_server import s3_variables
from raybatch.bench.checkpoints import ON_CPU, write_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.autoscaling import autoscaling_ray

# the server logs every request, so that the counts are evidence
_SERVE = """
import sys, time
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
inner = DomainDispatcherApplication(create_backend_app)
delay_s, log = float(sys.argv[1]), sys.argv[2]
def serve(environ, start_response):
    time.sleep(delay_s)
    with open(log, "a") as file:
        size = environ.get("HTTP_RANGE", "")
        print(environ["REQUEST_METHOD"], environ["PATH_INFO"], size, file=file)
    return inner(environ, start_response)
server = make_server("127.0.0.1", 0, serve, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
ROWS_PER_FILE = 8
PROMPT = "{document} w7 {question}"


@contextmanager
def slow_s3(delay_s: float, log: Path) -> Iterator[None]:
    """Serve S3 within the context, and put its address into the environment."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(delay_s), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None, "stdout is a pipe"
    try:
        os.environ |= s3_variables(f"http://127.0.0.1:{int(process.stdout.readline())}")
        yield
    finally:
        process.kill()
        process.wait()


class Hour:
    """Runs commands and counts S3 requests; prints each minute with its seconds."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self._log = folder, log
        self._num_seen = 0

    def raybatch(self, *arguments: str, code: int = 0) -> str:
        """Run a command of raybatch and return its output."""
        command = [sys.executable, "-m", "raybatch", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, check=False, timeout=900
        )
        text = done.stdout + done.stderr
        if done.returncode != code:
            raise SystemExit(f"{' '.join(arguments)} exited with code {done.returncode}:\n{text}")
        return text

    def s3_requests(self) -> Counter[str]:
        """Return the number of GET requests for each S3 path since the last call."""
        lines = self._log.read_text(encoding="utf-8").splitlines()
        new, self._num_seen = lines[self._num_seen :], len(lines)
        return Counter(
            path for method, path, *_ in (line.split(" ") for line in new) if method == "GET"
        )

    @contextmanager
    def minute(self, number: int, does: str) -> Iterator[list[str]]:
        found: list[str] = []
        began = time.monotonic()
        yield found
        print(f"minute {number:>2}  {time.monotonic() - began:6.1f} s  {does}")
        for line in found:
            print(f"{'':<21}{line}", flush=True)


def weights_of(requests: Counter[str]) -> int:
    return sum(count for path, count in requests.items() if path.endswith(".safetensors"))


def check(holds: bool, what: str) -> str:
    if not holds:
        raise SystemExit(f"CHECK FAILED: {what}")
    return what


def put(folder: Path, where: str) -> None:
    fsspec.filesystem("s3").put(f"{folder}/", where, recursive=True)


def make_inputs(folder: Path, num_files: int) -> None:
    """Write models and rows, and upload them to S3."""
    shape = ON_CPU["dense, 4 layers of 256"]
    write_checkpoint(shape, folder / "model")
    put(folder / "model", "s3://team/model")
    # a quantized checkpoint, which must be refused without fetching weights
    quantized = folder / "fp8"
    (folder / "model").rename(quantized)
    config = json.loads((quantized / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantized / "config.json").write_text(json.dumps(config), encoding="utf-8")
    put(quantized, "s3://team/model-fp8")
    random, rows = np.random.default_rng(0), folder / "rows"
    rows.mkdir()
    for i in range(num_files):
        document = " ".join(f"w{word}" for word in random.integers(1, 1000, 64))
        questions = [
            " ".join(f"w{word}" for word in random.integers(1, 1000, 8))
            for _ in range(ROWS_PER_FILE)
        ]
        table = pa.table({"document": [document] * ROWS_PER_FILE, "question": questions})
        pq.write_table(table, rows / f"{i:05}.parquet")
    put(rows, "s3://team/rows")


def walk(hour: Hour, num_files: int) -> None:
    """Go through the minutes."""
    run = ["run", "--input", "s3://team/rows", "--prompt", PROMPT, "--max-tokens", "8"]
    model = ["--model", "s3://team/model"]
    num_rows = num_files * ROWS_PER_FILE
    hour.s3_requests()
    with hour.minute(3, "tries ten rows: raybatch run --limit 10") as found:
        text = hour.raybatch(*run, *model, "--limit", "10", "--local")
        requests = hour.s3_requests()
        found.append(check(f"10 rows of {num_rows:,}" in text, "ten rows over the whole input"))
        found.append(check("nothing was written" in text, "nothing was written"))
        found.append(check(weights_of(requests) == 1, "the weights were fetched once"))
        read = sum(path.endswith(".parquet") for path in requests)
        found.append(f"{sum(requests.values())} GET requests to S3, {read} row files read")
    with hour.minute(5, "names an FP8 checkpoint for the native engine") as found:
        fp8 = ["--model", "s3://team/model-fp8", "--set", "backend=native"]
        text = hour.raybatch(*run, *fp8, "--output", "s3://team/refused", "--local", code=1)
        found.append(check("vllm" in text.lower(), text[text.index("quantized") :].strip()))
        found.append(check(not weights_of(hour.s3_requests()), "no weights were fetched for it"))
    with hour.minute(12, "writes a manifest with a token and the company's S3") as found:
        job = {
            "source": "s3://team/rows",
            "sink": "s3://team/answers",
            "stage": {"model": "s3://team/model", "prompt": PROMPT, "backend": "vllm"},
        }
        (hour.folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
        text = hour.raybatch(
            *("manifest", "kuberay", "job.yaml", "--image", "registry.example/raybatch:1"),
            *("--replicas", "8", "--gpus-per-pod", "8", "--secret", "HF_TOKEN=hub:token"),
            *("--model-volume", "models", "--env", "AWS_ENDPOINT_URL=https://s3.example"),
        )
        manifest = text[text.index("apiVersion") :]
        found.append(check("secretKeyRef" in manifest, "the token comes from a secret"))
        found.append(check("claimName: models" in manifest, "models are kept on a volume"))
        found.append(
            check("nvidia.com/gpu: '8'" in manifest, "one pod of eight GPUs, not eight pods")
        )
    with hour.minute(16, "asks for the cost of the job: raybatch explain, on a laptop") as found:
        hour.s3_requests()
        text = hour.raybatch(
            "explain", *run[1:], *model, "--output", "s3://team/answers", "--local"
        )
        found.append(check(f"{num_rows:,}" in text, f"it counts {num_rows:,} rows"))
        found.append(check(not weights_of(hour.s3_requests()), "no weights were fetched for it"))

    cluster = {"CPU": 1, "GPU": 1, "object_store_memory": 100 << 20}
    with autoscaling_ray(cluster, max_workers=2):
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        with hour.minute(18, "runs it on a cluster that adds GPU hosts on demand") as found:
            hour.s3_requests()
            options = ["pool.replicas=2", "pool.num_gpus_per_replica=1", "engine.device=cpu"]
            flags = [word for option in options for word in ("--set", option)]
            text = hour.raybatch(*run, *model, "--output", "s3://team/answers", *flags, "--ray")
            hosts = sum(bool(node["Resources"].get("GPU")) for node in ray.nodes())
            found.append(check(hosts == 2, "two hosts were added, one per engine with a GPU"))
            weights = weights_of(hour.s3_requests())
            found.append(check(not weights, "engines used the weights that minute 3 fetched"))
        del os.environ["RAY_ADDRESS"]
    with hour.minute(60, "looks at the answers: raybatch verify") as found:
        text = hour.raybatch("verify", "s3://team/answers")
        found.append(check(f"{num_rows:,} written" in text, " ".join(text.split())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay-ms", type=float, default=50.0, help="delay of each S3 response")
    parser.add_argument("--files", type=int, default=200)
    args = parser.parse_args()
    os.environ["RAY_TMPDIR"] = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder = Path(name)
        os.environ["RAYBATCH_CACHE_DIR"] = str(folder / "cache")
        with slow_s3(args.delay_ms / 1000, folder / "s3.log"):
            fsspec.filesystem("s3").mkdir("team")
            make_inputs(folder, args.files)
            walk(Hour(folder, folder / "s3.log"), args.files)


if __name__ == "__main__":
    main()
