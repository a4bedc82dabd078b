"""The documents agree with the code: options, defaults, links, job files, commands and scripts.

A block of shell or Python in README or docs is run here, or a comment in front of it says why not:
`<!-- not run: the reason -->`. Commands that are not run must still be ones that raybatch takes.
"""

import dataclasses
import inspect
import json
import re
import runpy
import shlex
import shutil
import tomllib
import warnings
from pathlib import Path

import click
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import typer.main
import yaml

from raybatch.actors.coordinator.counters import PoolMetrics, ReplicaMetrics
from raybatch.backends.vllm.meanings import NATIVE_ONLY
from raybatch.cli.app import app
from raybatch.cli.flags import nested_options, read_job_flags
from raybatch.config import (
    BackendConfig,
    EngineConfig,
    LimitConfig,
    PlanConfig,
    PoolConfig,
    WaveConfig,
)
from raybatch.demo.run import write_dataset
from raybatch.job.config import JobConfig
from raybatch.job.job import Job
from raybatch.records.types import Sampling
from raybatch.rows.options import StageConfig
from raybatch.stages.feeder import LLMStage
from raybatch_openai.endpoint.options import OpenAIOptions
from tests.cli.test_cli import run_main
from tests.distributions import DISTRIBUTIONS

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = sorted({*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *DOCS})
OPTIONS = "docs/reference/options.md"
SECTIONS = {
    "Job": JobConfig,
    "Limits": LimitConfig,
    "Waves": WaveConfig,
    "Plan": PlanConfig,
    "Stage": StageConfig,
    "Sampling": Sampling,
    "Engine": EngineConfig,
    "Pool": PoolConfig,
    "Backend": BackendConfig,
    "Options of endpoints": OpenAIOptions,
}
# an empty default is written as "none", a default config as nothing or by its gist
WRITTEN = {"None": "none", "()": "none", "{}": "none", "True": "true", "False": "false"}
# of other programs
FOREIGN_FLAGS = {"--dashboard-agent-listen-port", "--extra-index-url", "--help"}
FOREIGN_FLAGS |= {"--object-spilling-directory", "--torch-backend"}
CLI = typer.main.get_command(app)
JOB_FLAGS = set(inspect.signature(read_job_flags).parameters)
MAX_README_LINES, MAX_DOCS_WORDS, MAX_COLUMNS, MAX_CONCEPT_LINES = 120, 27_000, 140, 120


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block; `reason` says why it is not run, "" where it is."""

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(path):
    """Return the fenced blocks of a page."""
    blocks, fence, before = [], None, ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if fence is None and line.startswith("```"):
            reason = re.fullmatch(r"<!-- not run: (.+) -->", before)
            fence = (number, line[3:].strip(), [], reason[1] if reason else "")
        elif fence is not None and line.startswith("```"):
            start, language, lines, reason = fence
            name = str(path.relative_to(ROOT))
            blocks.append(Block(name, start, language, "".join(lines), reason))
            fence, before = None, ""
        elif fence is not None:
            fence[2].append(f"{line}\n")
        elif line.strip():
            before = line
    assert fence is None, f"{path}: a block has no end"
    return blocks


BLOCKS = [block for path in DOCS for block in blocks_of(path)]
SHELL = [block for block in BLOCKS if block.language == "console"]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def commands_of(block):
    """Return the commands of a block of shell as lists of words, those inside of $(...) too."""
    commands = []
    for line in block.text.replace("\\\n", " ").splitlines():
        plain = re.sub(r"\$'([^']*)'", lambda m: shlex.quote(m[1].replace("\\n", "\n")), line)
        words = [""]
        for word in shlex.split(plain, comments=True):
            if word in ("|", "&&", ";"):
                words = [""]
            else:
                if words == [""]:
                    commands.append(words := [])
                # variables that are set for one command
                if words or not re.match(r"[A-Z_]+=", word):
                    words.append(word)
                commands += [shlex.split(inner) for inner in re.findall(r"\$\(([^()]+)\)", word)]
    return [words for words in commands if words]


def option_rows(section):
    """Return option to default of the first table below a heading of the page of options."""
    text = (ROOT / OPTIONS).read_text()
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", body, re.MULTILINE))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_is_documented(section):
    names = {field.name for field in dataclasses.fields(SECTIONS[section])}
    if section == "Stage":
        names = set(inspect.signature(LLMStage).parameters) - {"unknown"}
    assert set(option_rows(section)) == names


@pytest.mark.parametrize("section", SECTIONS)
def test_documented_defaults_are_those_of_the_code(section):
    rows = option_rows(section)
    for field in dataclasses.fields(SECTIONS[section]):
        default = field.default
        if field.default_factory is dict:
            default = {}
        if default is dataclasses.MISSING or field.name not in rows:
            continue
        text = f'"{default}"' if isinstance(default, str) else str(default)
        assert (field.name, rows[field.name]) == (field.name, WRITTEN.get(text, text))


def anchors_of(path):
    """Return what links may name in a page: its headings as GitHub writes them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    broken = []
    for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_every_page_is_in_the_map():
    index = (ROOT / "docs" / "README.md").read_text()
    linked = set(re.findall(r"\]\(((?!\.\./)[^)]+\.md)\)", index))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/*/*.md")}
    assert linked == pages


def test_paths_that_the_documents_name_are_there():
    reasons = " ".join(block.reason for block in BLOCKS)
    named = re.findall(r"(?:tests|scripts|pipelines|examples)/[\w./]*\w", reasons)
    missing = [name for name in named if not (ROOT / name).exists()]
    for page in DOCS:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        names = re.findall(
            rf"`((?:{'|'.join(DISTRIBUTIONS)}|lab|tests|benchmarks|scripts)/[\w./]*)`", text
        )
        missing += [f"{page.name}: {name}" for name in names if not (ROOT / name).exists()]
    assert missing == []


def test_pages_that_the_code_names_are_there():
    folders = (*DISTRIBUTIONS, "lab", "scripts", "benchmarks", "pipelines", "examples")
    missing = []
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if ".work" in path.relative_to(ROOT).parts:  # environments that benchmarks made
            continue
        pages = re.findall(r"docs/[\w/-]+\.md", path.read_text())
        missing += [f"{path.name}: {page}" for page in pages if not (ROOT / page).exists()]
    assert missing == []


def test_modules_that_the_documents_name_are_there():
    files = {
        path.name
        for folder in (*DISTRIBUTIONS, "lab", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
    }
    missing = []
    for page in DOCS:
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            places = (ROOT / name, ROOT / "raybatch" / name)
            is_there = any(p.exists() for p in places) if "/" in name else name in files
            missing += [] if is_there else [f"{page.name}: {name}"]
    assert missing == []


def test_the_design_names_the_rooms_in_the_order_of_the_layers():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [layer.split(" : ") for layer in contracts["contracts"][0]["layers"]]
    page = (ROOT / "docs/develop/design.md").read_text()
    table = page.split("| room | in one sentence |\n")[1].split("\n\n")[0]
    rooms = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[1:]]
    assert [room for row in rooms for room in row] == [room for layer in layers for room in layer]


def test_the_page_of_vllm_says_what_becomes_of_every_option_of_engines():
    page = (ROOT / "docs/how-to/vllm.md").read_text()
    table = page.split("| raybatch | vLLM | |\n")[1].split("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines()[1:]]
    named = {name: row[3] for row in rows for name in re.findall(r"engine\.(\w+)", row[1])}
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    # a device is what Ray has assigned
    expected = names - {"device"}
    assert set(named) == expected
    native_only = {name for names, _ in NATIVE_ONLY for name in names}
    assert {name for name in expected if "refused" in named[name]} == native_only


def test_the_page_of_metrics_names_every_series():
    class Registry:
        def __init__(self):
            self.names = set()

        def __getattr__(self, kind):
            return lambda name, **options: self.names.add(name)

    registry = Registry()
    PoolMetrics(registry)
    ReplicaMetrics(0, registry)
    page = (ROOT / "docs/reference/metrics.md").read_text()
    assert set(re.findall(r"`(raybatch_\w+)`", page)) == registry.names


def test_blocks_have_a_language_that_is_looked_at():
    known = {"console", "python", "yaml", "json", "dockerfile", "text", ""}
    assert {block.language for block in BLOCKS} <= known


def test_the_job_file_of_the_readme_is_whole():
    (text,) = (b.text for b in BLOCKS if (b.page, b.language) == ("README.md", "yaml"))
    assert Job.from_mapping(yaml.safe_load(text)).config.stage.model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_pieces_of_job_files_are_valid_where_the_rest_is_added(block):
    mapping = yaml.safe_load(block.text)
    stage = mapping.get("stage", {})
    is_without_prompt = not {"prompt", "messages", "query"} & set(stage)
    added = {"prompt": "{text}"} if is_without_prompt else {}
    whole = {"source": "in", "sink": "out", **mapping, "stage": {"model": "m", **added, **stage}}
    assert Job.from_mapping(whole).config.source == whole["source"]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_json_in_the_documents_is_valid(block):
    assert isinstance(json.loads(block.text), dict)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_documents_compiles(page):
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, str(block), "exec")


def check_command(words):
    """Fail where raybatch, make or pip would not take a command."""
    program, *args = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{args[0]}:", makefile, re.MULTILINE), words
    elif program == "pip":
        project = (ROOT / "pyproject.toml").read_text()
        extras = set(re.findall(r"^(\w+) = \[", project, re.MULTILINE))
        for named in re.findall(r"(?:raybatch[\w.-]*|\.)\[([\w,]+)\]", " ".join(args)):
            assert set(named.split(",")) <= extras, words
    elif program == "raybatch":
        check_raybatch(args)


def check_raybatch(args):
    """Fail where the command line refuses arguments, or a job options that they set."""
    command, path = CLI, ["raybatch"]
    while hasattr(command, "commands") and args and not args[0].startswith("-"):
        path.append(args[0])
        command, args = command.commands[args[0]], args[1:]
    try:
        context = command.make_context(" ".join(path), list(args))
    except (click.exceptions.Exit, typer.Exit):
        return  # --version
    if set(context.params) >= JOB_FLAGS:
        flags = {name: context.params[name] for name in JOB_FLAGS}
        mapping = nested_options(None, read_job_flags(**{**flags, "job_file": None}))
        stage = {"model": "m", "prompt": "{a}", **mapping.get("stage", {})}
        Job.from_mapping({"source": "in", "sink": "out", **mapping, "stage": stage})


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_of_the_documents_are_taken(block):
    commands = commands_of(block)
    assert commands
    for words in commands:
        check_command(words)
        # what is another program's is for a reader, and no test
        assert block.reason or words[0] == "raybatch", words


def test_flags_that_the_documents_name_are_there():
    def flags(command):
        yield from (flag for p in command.params for flag in (*p.opts, *p.secondary_opts))
        for below in getattr(command, "commands", {}).values():
            yield from flags(below)

    named = set()
    for page in DOCS:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for span in re.findall(r"`((?:raybatch |--)[^`]*)`", text):
            named |= set(re.findall(r"--[a-z][a-z-]+", span))
    assert named - set(flags(CLI)) - FOREIGN_FLAGS == set()


def test_options_that_the_documents_name_are_there():
    sections = {
        "engine": EngineConfig,
        "pool": PoolConfig,
        "plan": PlanConfig,
        "sampling": Sampling,
        "limits": LimitConfig,
    }
    unknown = []
    for page in DOCS:
        for section, name in re.findall(r"[`(]([a-z]+)\.([a-z_]+)[`:=) ]", page.read_text()):
            if section in sections and name != "json" and not name.endswith("_"):
                names = {field.name for field in dataclasses.fields(sections[section])}
                unknown += [f"{page.name}: {section}.{name}"] if name not in names else []
    assert unknown == []


def test_the_page_of_the_command_line_names_every_command():
    def paths(group, path=("raybatch",)):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from paths(command, (*path, name))
            else:
                yield " ".join((*path, name))

    page = (ROOT / "docs/reference/cli.md").read_text()
    assert set(re.findall(r"^\| `(raybatch [a-z -]+)` \|", page, re.MULTILINE)) == set(paths(CLI))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Return a folder with what the pages speak of: prompts, a job file, its output."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("demo-out/prompts", "prompts"):
        write_dataset(folder / name, num_documents=2, questions_per_document=2, seed=0, num_files=1)
    job = {
        "source": "prompts",
        "sink": "answers",
        "executor": "local",
        "stage": {"model": "demo", "prompt": "{document} {question}", "backend": "fake"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_main(patch, "run", "job.yaml") == 2
        assert run_main(patch, "retry-errors", "job.yaml", "--into", "answers-retried") == 2
    return folder


@pytest.fixture
def place(workplace, tmp_path, monkeypatch):
    """Go into a copy of the work place, with no cluster in sight."""
    shutil.copytree(workplace, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def pages_to_run(blocks):
    return list(dict.fromkeys(block.page for block in blocks if not block.reason))


@pytest.mark.parametrize("page", pages_to_run(SHELL))
def test_commands_of_a_page_run(place, page):
    if page.endswith("resume-and-retry.md"):
        shutil.rmtree("answers-retried")
    files = [yaml.safe_load(b.text) for b in BLOCKS if (b.page, b.language) == (page, "yaml")]
    for job in files:
        # a whole one, with a model that is at hand, is the job file of its page
        if job.get("stage", {}).get("model") == "demo":
            Path("job.yaml").write_text(yaml.safe_dump(job))
    for block in SHELL:
        for words in commands_of(block) if block.page == page and not block.reason else ():
            # 2: there are error rows
            assert run_main(place, *words[1:]) in (0, 2), words


@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize("page", pages_to_run(PYTHON))
def test_python_of_a_page_runs(place, page):
    names = {"__name__": "page"}
    for block in PYTHON:
        if block.page == page and not block.reason:
            exec(compile(block.text, str(block), "exec"), names)


def test_the_readme_answers_the_same_by_script_and_by_command(place):
    (script,) = (block.text for block in PYTHON if block.page == "README.md")
    (run,) = (b for b in SHELL if b.page == "README.md" and "raybatch run" in b.text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(script, {})
    run_main(place, *commands_of(run)[0][1:])
    tables = [pq.read_table(f"demo-out/{name}") for name in ("from-script", "from-command")]
    for table in tables:
        wrong = [bool(error) for error in table["__inference_error__"].to_pylist()]
        # the demo's bad rows; questions are answered by words of their documents
        assert (len(wrong), sum(wrong)) == (8, 4)
        texts = table.filter(pc.equal(table["__inference_error__"], ""))["generated_text"]
        assert all(texts.to_pylist())


def test_the_tree_of_the_readme_is_what_its_script_leaves(place):
    (script,) = (block.text for block in PYTHON if block.page == "README.md")
    (tree,) = (b.text for b in BLOCKS if b.page == "README.md" and "_SUCCESS" in b.text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(script, {})
    folder, paths = "", []
    for indent, name in re.findall(
        r"^( *)([\w./-]+/|[\w./-]+\.parquet|_SUCCESS) ", tree, re.MULTILINE
    ):
        folder = folder if indent else name
        paths.append(Path(folder, name if indent else ""))
    assert len(paths) == 6
    assert [str(path) for path in paths if not path.exists()] == []
    types = dict(re.findall(r"(\w+): (string|int32|int64)\b", tree))
    schema = pq.read_schema(paths[3])
    assert types == {name: str(schema.field(name).type) for name in types}
    assert {"document", "generated_text", "__inference_error__"} <= set(types)


def test_figures_are_those_that_the_script_draws():
    script = ROOT / "docs" / "figures" / "draw.py"
    figures = runpy.run_path(str(script))["FIGURES"]
    drawn = {f"{name}.svg": draw().svg() for name, draw in figures.items()}
    assert drawn == {path.name: path.read_text() for path in script.parent.glob("*.svg")}


def test_the_readme_and_the_pages_are_short():
    words = sum(len(page.read_text().split()) for page in DOCS[1:])
    assert words <= MAX_DOCS_WORDS
    assert len(DOCS[0].read_text().splitlines()) <= MAX_README_LINES
    concepts = [page for page in DOCS if page.parent.name == "concepts"]
    assert max(len(page.read_text().splitlines()) for page in concepts) <= MAX_CONCEPT_LINES


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short_where_they_are_no_table(page):
    if page == ROOT / OPTIONS:
        return  # written by a script, of docstrings
    lines = enumerate(page.read_text().splitlines(), 1)
    long = [n for n, line in lines if len(line) > MAX_COLUMNS and not line.startswith("|")]
    assert long == []
