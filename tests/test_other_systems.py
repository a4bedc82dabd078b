"""What Linux alone has: where it is named, and what raybatch does on a system without it."""

import ast
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raybatch.demo.run import write_dataset
from raybatch.demo.task import PROMPT
from raybatch.job.job import Job
from tests.distributions import DISTRIBUTIONS

ROOT = Path(__file__).parents[1]
# what hides it from raybatch, in a process and in those that it starts
WITHOUT_LINUX = ROOT / "tests" / "without_linux"

# names that macOS lacks, or that mean something else there, and the question which system this is
NAMES = re.compile(
    r"sched_[gs]et\w+|memfd_create|MFD_\w+|posix_fa\w+|POSIX_FADV_\w+|MADV_\w+|MAP_POPULATE"
    r"|waitid|pidfd_\w+|eventfd|epoll|prctl|timerfd_\w+|O_(DIRECT|TMPFILE|PATH|NOATIME)"
    r"|copy_file_range|splice|sendfile|[gs]etxattr|unshare|setns|SO_PEERCRED|sigtimedwait"
    r"|sigwaitinfo|ru_maxrss|malloc_trim|mallopt|sys\.platform"
)
FILES = re.compile(r"/proc\b|/sys/|/dev/shm")
# each has another form beside it, or refuses
PLACES = {
    # no such folder: no GPU; and it waits for the process instead, and ends its group at once
    "raybatch/actors/executors/local_pools.py": {"/proc", "waitid"},
    "raybatch/backends/cost_cache.py": {"/proc"},
    "lab/raybatch_lab/stages/measured.py": {"/proc"},
    # all cores of the host
    "raybatch/actors/replicas/placement.py": {"sched_getaffinity"},
    # of vLLM, which runs on Linux
    "raybatch/backends/vllm/ranks.py": {"/proc"},
    # freed memory stays with the process
    "raybatch/engine/loading/loaded_model.py": {"sys.platform", "mallopt", "malloc_trim"},
    # the size of the host by sysconf, half of which counts as free
    "raybatch/engine/memory/kv_cache.py": {"/proc", "/sys/"},
    # refuses: owned weights are an error, and ranks of a TP group use TCP
    "raybatch-extensions/raybatch_extensions/ranks/mapped.py": {
        "/proc",
        "memfd_create",
        "posix_fallocate",
    },
    "raybatch-extensions/raybatch_extensions/ranks/shared_memory.py": {"/proc"},
    # tells Windows from all others
    "raybatch/engine/memory/pinned.py": {"sys.platform"},
    # the name of the processor that Python knows
    "raybatch/engine/profile/cached_file.py": {"/proc"},
    # small pages
    "raybatch/engine/weights/layout.py": {
        *("sys.platform", "posix_fadvise", "POSIX_FADV_DONTNEED", "MADV_HUGEPAGE")
    },
    # each process compiles its kernels
    "raybatch/kernels/native/compiler.py": {"/proc"},
    # of a pod of Kubernetes, wherever its manifest is made
    "raybatch-submit/raybatch_submit/manifest.py": {"/dev/shm"},
}

# prints what raybatch takes a host for
FACTS = """
import json, os, torch
from raybatch.actors.executors.local_pools import gpus_of_host
from raybatch.actors.replicas.placement import usable_cores
from raybatch.engine.memory.kv_cache import free_memory_bytes, host_memory_bytes
from raybatch_extensions.ranks.mapped import pid_namespace
from raybatch_extensions.sharing.segments import HostSegment
from raybatch.engine.profile.cached_file import cpu_name
from raybatch.errors import ConfigError
from raybatch.kernels.native.compiler import library_name
try:
    segment = HostSegment(64, free_bytes=1 << 30)
except ConfigError as error:
    segment = str(error)
print(json.dumps({
    "cores": usable_cores(),
    "gpus": gpus_of_host(),
    "free": free_memory_bytes(torch.device("cpu")),
    "memory": host_memory_bytes(),
    "namespace": pid_namespace(),
    "segment": segment,
    "cpu": cpu_name(),
    "library": library_name(["cc"], []),
}))
"""


def names_in(path: Path) -> set[str]:
    """Return what a module names of Linux outside its docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = node.attr if node.attr != "platform" else ast.unparse(node)
        elif isinstance(node, ast.alias):
            name = node.name
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            name = str(node.value)
            found.update(FILES.findall(name))
        else:
            continue
        if NAMES.fullmatch(name):
            found.add(name)
    return found


def without_linux(*command: str, folder: Path) -> str:
    """Run Python where raybatch sees nothing that Linux alone has; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(WITHOUT_LINUX), str(ROOT)))}
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_what_linux_alone_has_is_named_in_these_places_alone():
    folders = (*DISTRIBUTIONS, "lab")
    modules = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): names_in(path) for path in modules}
    assert PLACES == {module: names for module, names in found.items() if names}


def test_a_host_without_the_files_of_linux_is_known_as_far_as_python_knows_it(tmp_path):
    facts = json.loads(without_linux("-c", FACTS, folder=tmp_path))
    segment, cpu = facts.pop("segment"), facts.pop("cpu")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts == {
        "cores": os.cpu_count(),
        "gpus": 0,
        "memory": memory,
        "free": memory // 2,
        "namespace": 0,
        "library": None,
    }
    assert cpu
    assert re.fullmatch(r"engine\.weights='shared': .* needs Linux; leave .* out", segment)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_without_linux_writes_the_same_texts(tmp_path, monkeypatch, compiles):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    write_dataset(tmp_path / "in", num_documents=1, questions_per_document=4, seed=0, num_files=1)
    options = {
        "source": str(tmp_path / "in"),
        "executor": "local",
        "stage": {
            "model": "demo",
            "prompt": PROMPT,
            "sampling": {"temperature": 0, "max_tokens": 16},
            "engine": {"device": "cpu", "compile_kernels": compiles},
            "pool": {"replicas": 1},
        },
    }
    Job.from_mapping({**options, "sink": str(tmp_path / "usual")}).run(progress=lambda *_: None)
    (tmp_path / "job.yaml").write_text(json.dumps({**options, "sink": "out"}))
    run = partial(without_linux, "-m", "raybatch", folder=tmp_path)
    run("run", "job.yaml", "--allow-error-rows")
    columns = ["row_id", "generated_text", "finish_reason", "num_generated_tokens"]
    usual, out = (pq.read_table(tmp_path / name, columns=columns) for name in ("usual", "out"))
    assert usual.sort_by("row_id").equals(out.sort_by("row_id"))
    assert "verdict: complete, every row exactly once" in run("verify", "out")
    assert "in the source, 4 for the engines" in run("explain", "job.yaml", "--no-measure")
