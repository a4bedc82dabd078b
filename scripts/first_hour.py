"""Walks the first hour of a new user with a cluster, on a slow S3 and random-weight models.

python scripts/first_hour.py                 # some minutes, two cores
python scripts/first_hour.py --delay-ms 20 --files 200

The S3 is moto's, on this host, and answers each request after a delay. The cluster is Ray's, of
processes on this host: a head without GPUs, to which hosts with pretended GPUs come when engines
ask for them. Each line is a minute of the hour, what is done, and what is checked; the first that
does not hold ends it.
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

# the server logs what is asked for, so that nobody has to be believed
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
    """Serve S3 for the context, and put its address into the environment."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(delay_s), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None, "it was asked for"
    try:
        os.environ |= s3_variables(f"http://127.0.0.1:{int(process.stdout.readline())}")
        yield
    finally:
        process.kill()
        process.wait()


class Hour:
    """Runs commands, and tells each minute with what it took."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self._log = folder, log
        self._num_seen = 0

    def raybatch(self, *arguments: str, code: int = 0) -> str:
        """Run a command of raybatch and return all that it said."""
        command = [sys.executable, "-m", "raybatch", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, check=False, timeout=900
        )
        text = done.stdout + done.stderr
        if done.returncode != code:
            raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{text}")
        return text

    def asked(self) -> Counter[str]:
        """Return how often S3 was asked for each path since the last call."""
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


def weights_of(asked: Counter[str]) -> int:
    return sum(count for path, count in asked.items() if path.endswith(".safetensors"))


def check(holds: bool, what: str) -> str:
    if not holds:
        raise SystemExit(f"DOES NOT HOLD: {what}")
    return what


def put(folder: Path, where: str) -> None:
    fsspec.filesystem("s3").put(f"{folder}/", where, recursive=True)


def make_inputs(folder: Path, num_files: int) -> None:
    """Write models and rows, and bring them to S3."""
    shape = ON_CPU["dense, 4 layers of 256"]
    write_checkpoint(shape, folder / "model")
    put(folder / "model", "s3://team/model")
    # a quantized checkpoint: nobody is to fetch weights in order to refuse it
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
    hour.asked()
    with hour.minute(3, "tries ten rows: raybatch run --limit 10") as found:
        text = hour.raybatch(*run, *model, "--limit", "10", "--local")
        asked = hour.asked()
        found.append(check(f"10 rows of {num_rows:,}" in text, "ten rows over the whole input"))
        found.append(check("nothing was written" in text, "nothing was written"))
        found.append(check(weights_of(asked) == 1, "the weights were fetched once"))
        read = sum(path.endswith(".parquet") for path in asked)
        found.append(f"S3 was asked for {sum(asked.values())} objects, {read} files of rows")
    with hour.minute(5, "names an FP8 checkpoint for the native engine") as found:
        fp8 = ["--model", "s3://team/model-fp8", "--set", "backend=native"]
        text = hour.raybatch(*run, *fp8, "--output", "s3://team/refused", "--local", code=1)
        found.append(check("vllm" in text.lower(), text[text.index("quantized") :].strip()))
        found.append(check(not weights_of(hour.asked()), "no weights were fetched for it"))
    with hour.minute(12, "wants a token and an S3 of the company in a manifest") as found:
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
        found.append(check("nvidia.com/gpu: '8'" in manifest, "one pod of eight GPUs, not eight"))
    with hour.minute(16, "asks what the job takes: raybatch explain, on a laptop") as found:
        hour.asked()
        text = hour.raybatch(
            "explain", *run[1:], *model, "--output", "s3://team/answers", "--local"
        )
        found.append(check(f"{num_rows:,}" in text, f"it counts {num_rows:,} rows"))
        found.append(check(not weights_of(hour.asked()), "no weights were fetched for it"))

    cluster = {"CPU": 1, "GPU": 1, "object_store_memory": 100 << 20}
    with autoscaling_ray(cluster, max_workers=2):
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        with hour.minute(18, "runs it on a cluster without a GPU, whose hosts come") as found:
            hour.asked()
            options = ["pool.replicas=2", "pool.num_gpus_per_replica=1", "engine.device=cpu"]
            flags = [word for option in options for word in ("--set", option)]
            text = hour.raybatch(*run, *model, "--output", "s3://team/answers", *flags, "--ray")
            hosts = sum(bool(node["Resources"].get("GPU")) for node in ray.nodes())
            found.append(check(hosts == 2, "two hosts came, for engines that ask for a GPU each"))
            weights = weights_of(hour.asked())
            found.append(check(not weights, "weights are those that the first look fetched"))
        del os.environ["RAY_ADDRESS"]
    with hour.minute(60, "looks at the answers: raybatch verify") as found:
        text = hour.raybatch("verify", "s3://team/answers")
        found.append(check(f"{num_rows:,} written" in text, " ".join(text.split())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay-ms", type=float, default=50.0, help="of each answer of S3")
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
