"""Print the sizes of the project: files per folder, lines, modules with one importer, docs.

    python scripts/measure_house.py [--most 10]

Exit code 1 if a limit of docs/develop/design.md is exceeded.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "raybatch"
# 68,000 lines, and 5,000 for what came after them
MAX_FILES, MAX_LINES, MAX_FILES_PER_FOLDER = 450, 73_000, 20
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 70
# GPU programs, each of which Triton compiles as a whole
ONE_PROGRAM = f"{PACKAGE}.kernels.triton.jit"
MAX_README_LINES, MAX_DOCS_WORDS = 120, 27_000
KIND = re.compile(r"\bkind\b\s*(==|!=|in \()")


def main() -> int:
    """Print the figures and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=10, help="rows of a list that are printed")
    most = parser.parse_args().most
    files = {_name_of(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in files.values())
    crowded = {folder: num for folder, num in folders.items() if num > MAX_FILES_PER_FOLDER}
    print(f"{len(files)} files (most {MAX_FILES}), {sum(lines.values())} lines (most {MAX_LINES})")
    print(f"folders with more than {MAX_FILES_PER_FOLDER} files: {len(crowded)} of {len(folders)}")
    for folder, num in folders.most_common(most):
        print(f"  {num:4d}  {folder}")
    long = [f"{name}: {num} lines" for name, num in lines.items() if num > MAX_FILE_LINES]
    long += _long_functions(files)
    print(f"files over {MAX_FILE_LINES} lines, functions over {MAX_FUNCTION_LINES}: {len(long)}")
    for place in long:
        print(f"  {place}")
    alone = _with_one_importer(files)
    beside = [name for name, user in alone.items() if _folder(name) == _folder(user)]
    print(
        f"modules with one importer: {len(alone)}, {sum(lines[name] for name in alone)} lines; "
        f"{len(beside)} of them in the folder of the importer"
    )
    for name in sorted(beside, key=lambda name: lines[name])[:most]:
        print(f"  {lines[name]:4d}  {name} <- {alone[name]}")
    kinds = _kinds_compared(files)
    print(f"comparisons of a backend's kind outside backends/: {len(kinds)}")
    for place in kinds:
        print(f"  {place}")
    readme = len((ROOT / "README.md").read_text().splitlines())
    words = sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))
    print(f"README: {readme} lines (most {MAX_README_LINES})")
    print(f"docs: {words} words (most {MAX_DOCS_WORDS})")
    is_well = (
        len(files) <= MAX_FILES
        and sum(lines.values()) <= MAX_LINES
        and not crowded
        and not long
        and not kinds
        and readme <= MAX_README_LINES
        and words <= MAX_DOCS_WORDS
    )
    return 0 if is_well else 1


def _name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _folder(name: str) -> str:
    return name.rpartition(".")[0]


def _long_functions(files: dict[str, Path]) -> list[str]:
    found = []
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES and not name.startswith(ONE_PROGRAM):
                found.append(f"{name}.{node.name}: {num_lines} lines")
    return found


def _with_one_importer(files: dict[str, Path]) -> dict[str, str]:
    """Return the modules that a single module of the package imports, and their importers."""
    users: dict[str, set[str]] = {name: set() for name in files}
    for user, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in files else node.module for name in named]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                if name in users and name != user:
                    users[name].add(user)
    return {name: next(iter(found)) for name, found in users.items() if len(found) == 1}


def _kinds_compared(files: dict[str, Path]) -> list[str]:
    return [
        f"{name}:{number}"
        for name, path in files.items()
        if not name.startswith(f"{PACKAGE}.backends")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if "backend" in line and KIND.search(line)
    ]


if __name__ == "__main__":
    sys.exit(main())
