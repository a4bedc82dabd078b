"""Every example runs as a user starts it and prints its stated output; so does the notebook.

Endpoints are a server in this process, which answers as the demo model does. What vLLM answers is
compared where vLLM is installed.
"""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.openai.endpoint.endpoint_server import EndpointServer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "raybatch_tour.ipynb"
MIN_LINES, MAX_LINES = 15, 50
ON_RAY = (pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600))
# a prompt is its document, a blank line and its question
QUESTION = re.compile(r"(.*)\n\nQuestion: (.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Example:
    """How an example is run; `varies` matches output that need not repeat."""

    args: tuple[str, ...] = ()
    model: str | None = None
    varies: str = r"(?!)"
    marks: tuple[pytest.MarkDecorator, ...] = ()


RUN = {
    "01_summarize.py": Example(),
    "02_classify.py": Example(),
    # guesses of a model that knows no JSON: other kernels may guess otherwise
    "03_extract_json.py": Example(varies=r"(?<='day': ')\w+|(?<='price': )\d+"),
    "04_judge.py": Example(),
    "05_ray_pipeline.py": Example(marks=ON_RAY),
    # of a run that is killed at any time
    "06_resume_after_a_crash.py": Example(
        varies=r"\d+(?= files| of them)", marks=(pytest.mark.slow, pytest.mark.timeout(900))
    ),
    "07_vllm_on_gpus.py": Example(args=("--check",), model="demo"),
    "09_from_ray_data_llm.py": Example(marks=ON_RAY),
}
# with separate tests below
ELSEWHERE = {"08_openai_endpoint.py"}


def run_script(folder, script, *args, **variables):
    """Run a script in a folder, and return its standard output."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "MODEL"},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # Ray Data starts 32 processes by default to read the footers of a few files
        "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "1",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, str(script), *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def printed_by(name):
    """Return the output that an example has as a comment at its end."""
    lines = (EXAMPLES / name).read_text().partition("\n# Output:\n")[2].splitlines()
    assert lines, name
    assert all(line.startswith("#") for line in lines), name
    return [line[2:] for line in lines]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=example.marks, id=name) for name, example in RUN.items()]
)
def test_an_example_prints_what_it_says(name, tmp_path):
    example = RUN[name]
    variables = {"MODEL": example.model} if example.model else {}
    if "--check" in example.args:
        # nothing that an earlier run measured
        variables["RAYBATCH_CACHE_DIR"] = str(tmp_path / "cache")
    if pytest.mark.ray in example.marks:
        # another cluster on this machine is none of ours
        variables["RAY_ADDRESS"] = "local"
    printed = run_script(tmp_path, EXAMPLES / name, *example.args, **variables).splitlines()

    def settled(lines):
        return [re.sub(example.varies, "~", line.rstrip()) for line in lines]

    assert settled(printed) == settled(printed_by(name))


def test_no_example_is_forgotten():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*RUN, *ELSEWHERE}
    assert set(re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text())) == {
        *RUN,
        *ELSEWHERE,
        NOTEBOOK.name,
    }


@pytest.mark.parametrize("name", [*RUN, *ELSEWHERE])
def test_an_example_has_its_settings_on_top_and_is_short(name):
    source = (EXAMPLES / name).read_text()
    tree = ast.parse(source)
    assert len(ast.get_docstring(tree).split("\n\n")) == 3, "what it is, why, how to start it"
    kinds = [type(node) for node in tree.body[1:]]
    body = [node for node in tree.body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]
    assert kinds.index(ast.Assign) == len(kinds) - len(body)
    assert body[0].targets[0].id == "MODEL"
    settings = [
        node for node in body if isinstance(node, ast.Assign) and node.targets[0].id.isupper()
    ]
    rest = [node for node in body if node not in settings]
    num_lines = sum(node.end_lineno - node.lineno + 1 for node in rest)
    assert num_lines <= MAX_LINES
    assert MIN_LINES <= num_lines + sum(n.end_lineno - n.lineno + 1 for n in settings)


def answers_of_the_demo():
    """Return the answers of the demo's model to the questions of the endpoint's example."""
    says = [line.partition("? ") for line in printed_by("08_openai_endpoint.py")]
    return {question + "?": answer for question, mark, answer in says if mark}


def test_the_endpoint_gets_every_prompt_and_its_answers_are_written(tmp_path):
    answers = answers_of_the_demo()

    def answer(number, body):
        (message,) = body["messages"]
        text = answers[QUESTION.fullmatch(message["content"])[2]]
        usage = {"prompt_tokens": 200_000, "completion_tokens": 10_000}
        choice = {"index": 0, "finish_reason": "stop", "message": {"content": text}}
        return 200, {}, {"choices": [choice], "usage": usage}

    with EndpointServer() as server:
        server.react = answer
        printed = run_script(
            tmp_path,
            EXAMPLES / "08_openai_endpoint.py",
            MODEL="served",
            OPENAI_BASE_URL=server.url,
            OPENAI_API_KEY="secret",
        ).splitlines()
        requests, headers = server.requested, server.headers
    assert [body["model"] for body in requests] == ["served"] * 8
    assert {header["Authorization"] for header in headers} == {"Bearer secret"}
    assert printed[:-1] == printed_by("08_openai_endpoint.py")[:-1]
    # 8 x (0.2 x 0.40 + 0.01 x 1.60)
    assert printed[-1] == "1680000 tokens cost 0.768"


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_an_endpoint_of_vllm_answers_as_the_example_says(tmp_path):
    serving = import_module("tests.backends.test_vllm_endpoint").serving
    with serving(tmp_path / "log") as url:
        printed = run_script(
            tmp_path, EXAMPLES / "08_openai_endpoint.py", MODEL="served", OPENAI_BASE_URL=url
        )
    assert printed.splitlines() == printed_by("08_openai_endpoint.py")


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_vllm_example_runs_with_other_settings(tmp_path):
    source = (EXAMPLES / "07_vllm_on_gpus.py").read_text()
    # on a host without GPUs
    for one, other in (('_size": 2', '_size": 1'), ('"replicas": None', '"replicas": 1')):
        assert source.count(one) == 1
        source = source.replace(one, other)
    script = tmp_path / "job.py"
    script.write_text(source)
    room = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    printed = run_script(tmp_path, script, MODEL="demo", **room)
    assert "rows: 1024 in, 1024 out, 0 lost" in printed.splitlines()
    rows = pq.read_table(tmp_path / "examples-out/vllm/answers").to_pylist()
    right = sum(row["generated_text"] == row["answer"] for row in rows)
    assert right >= 0.9 * len(rows)


@pytest.fixture
def write_notebook(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("write_notebook")


def test_the_notebook_has_the_code_of_its_examples(write_notebook):
    def without_outputs(cells):
        return [{k: v for k, v in cell.items() if k in ("cell_type", "source")} for cell in cells]

    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert without_outputs(cells) == without_outputs(write_notebook.notebook_cells())
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))


@pytest.mark.parametrize("name", ["01_summarize.py", "05_ray_pipeline.py"])
def test_the_notebook_keeps_what_its_examples_print(name):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    streams = [stream for cell in cells for stream in cell.get("outputs", ())]
    text = "".join(line for stream in streams for line in stream["text"])
    assert "\n".join(printed_by(name)) in text


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_and_prints_what_it_keeps(tmp_path):
    run_script(tmp_path, ROOT / "scripts" / "write_notebook.py", "--check", RAY_ADDRESS="local")
