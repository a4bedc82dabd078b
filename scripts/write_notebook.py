"""Write examples/raybatch_tour.ipynb from the examples that it shows, and run it.

    python scripts/write_notebook.py [--check]

A docstring becomes a text cell, every paragraph of code a code cell. The cells run in order, in an
empty folder, and the notebook keeps their output. `--check` writes nothing and exits with code 1 if
the notebook is out of date. Neither a kernel nor Jupyter is needed.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "raybatch_tour.ipynb"
SHOWN = ("01_summarize.py", "05_ray_pipeline.py")
HEAD = """# A tour of raybatch

Two of the [examples](README.md), cell by cell: a job over a folder of Parquet files, and a model
inside a Ray Data pipeline. Both run on a CPU with the small model that comes with raybatch; its
[README](../README.md#install-and-try) says how to install it."""
# comment before the output of an example
OUTPUT = "# Output:\n"

Cell = dict[str, Any]


def main() -> int:
    """Write or check the notebook, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    cells = run_cells(notebook_cells())
    text = notebook_text(cells)
    if not is_check:
        NOTEBOOK.write_text(text)
    elif NOTEBOOK.read_text() != text:
        print(f"{NOTEBOOK} is out of date; run this script without --check")
        print(text)
        return 1
    return 0


def notebook_cells() -> list[Cell]:
    """Return the cells of the notebook, without outputs."""
    cells = [_cell("markdown", HEAD)]
    for name in SHOWN:
        source = (EXAMPLES / name).read_text().split(OUTPUT)[0]
        tree = ast.parse(source)
        title, _, why = (ast.get_docstring(tree) or "").partition("\n")
        # the last paragraph is the command that starts the script
        why = why.strip().rpartition("\n\n")[0]
        cells.append(
            _cell("markdown", f"## {title.rstrip('.')}\n\n{why}\n\nAs a script: [{name}]({name}).")
        )
        cells += [_cell("code", text) for text in _paragraphs(source, tree)]
    return cells


def _paragraphs(source: str, tree: ast.Module) -> list[str]:
    """Return the code below the docstring, split at blank lines; all imports are one piece."""
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
    paragraphs = re.split(r"\n\n+(?=\S)", code)
    imports = [text for text in paragraphs if text.startswith(("import ", "from "))]
    return ["\n\n".join(imports), *(text for text in paragraphs if text not in imports)]


def _cell(kind: str, text: str) -> Cell:
    cell: Cell = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def run_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Run the code of cells in order, in an empty folder, and return them with their output.

    The standard error of a cell (logs and progress) is not kept.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    done: list[Cell] = []
    number = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in cells:
            if cell["cell_type"] != "code":
                done.append(cell)
                continue
            number += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), namespace)
            text = printed.getvalue().splitlines(keepends=True)
            stream = {"name": "stdout", "output_type": "stream", "text": text}
            done.append({**cell, "execution_count": number, "outputs": [stream] if text else []})
    return done


def notebook_text(cells: Iterable[Cell]) -> str:
    """Return the JSON of a notebook."""
    named = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells)]
    notebook = {
        "cells": named,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("RAY_DATA_PARQUET_FOOTER_NUM_ACTORS", "1")
    sys.exit(main())
