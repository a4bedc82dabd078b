"""JSON lines are what json.loads makes of them, or are refused with file and line."""

import gzip
import json
import random
import re
from functools import partial

import pytest

from raybatch.errors import ConfigError
from raybatch.inputs import file_slices, json_lines
from raybatch.inputs.source import scan_source

TEXTS = [
    "",
    "a",
    "é\u2028",
    "2024-01-01",
    "2024-01-01 10:00:00",
    "1",
    "null",
    '"',
    "\\",
    "\0",
    "🙂",
]
NUMBERS = [0, 1, -7, 2**31, 2**53, -(2**63), 2**63 - 1, 0.5, -2.25, 1e300, 3.0, 5e-324]
ODD_NUMBERS = [2**53 + 1, 2**60, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**25, 1e17]
KINDS = ("text", "int", "number", "bool", "null", "list", "object", "any")


def drawn(rng, kind, depth):
    """A value of a kind; null every few times."""
    if kind == "null" or rng.random() < 0.25:
        return None
    if kind == "any" or (kind in ("list", "object") and not depth):
        kind = rng.choice(["text", "int", "number", "bool", *(["list", "object"] if depth else [])])
    if kind == "text":
        return rng.choice(TEXTS)
    if kind == "int":
        return rng.choice([n for n in NUMBERS if isinstance(n, int)])
    if kind == "number":
        return rng.choice(NUMBERS + ODD_NUMBERS * (rng.random() < 0.1))
    if kind == "bool":
        return rng.random() < 0.5
    inner = rng.choice(KINDS) if rng.random() < 0.15 else "any" if rng.random() < 0.1 else None
    if kind == "list":
        inner = inner or rng.choice(["text", "int", "bool", "null", "list", "object"])
        # nulls first are what Arrow's parser gets wrong
        nulls = [None] * rng.choice([0, 0, 1, 3])
        return nulls + [drawn(rng, inner, depth - 1) for _ in range(rng.randrange(4))]
    names = rng.sample(["a", "b", "enum", ""], rng.randrange(4))
    return {name: drawn(rng, inner or "int" if name < "b" else "text", depth - 1) for name in names}


def drawn_rows(rng):
    is_wild = rng.random() < 0.2
    # texts and lists in one column are refused
    of_columns = KINDS if is_wild else KINDS[:-1]
    names = rng.sample(["x", "y", "z", "é"], rng.randrange(1, 4))
    kinds = {name: rng.choice(of_columns) for name in names}

    def row():
        row = {}
        for name, kind in kinds.items():
            if rng.random() < 0.9:
                kind = rng.choice(KINDS) if is_wild and rng.random() < 0.1 else kind
                row[name] = drawn(rng, kind, rng.randrange(1, 4))
        return row

    return [row() for _ in range(rng.randrange(1, 30))]


def without_nulls(value):
    """Objects without their nulls: Arrow has a null where a line has no such name."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def exactly(value):
    """A value whose equality tells true from 1; a whole number is one of its fractions."""
    if isinstance(value, dict):
        return {name: exactly(item) for name, item in value.items()}
    if isinstance(value, list):
        return [exactly(item) for item in value]
    return value if isinstance(value, bool | str | None) else ("number", value)


def read_texts(table, names):
    """The rows of a table; columns that were kept as JSON texts as what they hold."""
    rows = table.to_pylist()
    for row in rows:
        row.update({n: json.loads(row[n]) for n in names if row.get(n) is not None})
    return rows


def write_lines(path, rows, rng):
    text = rng.choice(["\n", "\r\n", "\n\n"]).join(
        json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows
    )
    data = (text + "\n" * (rng.random() < 0.7)).encode()
    is_packed = rng.random() < 0.3
    path = path.with_suffix(".jsonl.gz" if is_packed else ".jsonl")
    path.write_bytes(gzip.compress(data, 1) if is_packed else data)


def numbers_in(value):
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [number for item in inner for number in numbers_in(item)]
    return [value] if type(value) in (int, float) else []


def misfits(rows):
    """The columns of plain values that no type of Arrow holds exactly."""
    names = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        kinds = {float if type(value) is int else type(value) for value in values}
        whole = [value for value in values if type(value) is int]
        if kinds == {float}:
            if len(whole) < len(values):
                fits = all(abs(n) < 2**1023 and float(n) == n for n in whole)
            else:
                fits = min(whole) >= -(2**63) and max(whole) < 2 ** (63 + (min(whole) >= 0))
        elif kinds <= {list, dict}:
            fits = True
        else:
            fits = len(kinds) < 2
        if not fits:
            names.append(name)
    return names


def may_misfit(rows):
    """These columns, and those of lists or objects that mix fractions and large numbers.

    What another block or file holds is known too late to read such a one as JSON texts.
    """
    names = misfits(rows)
    for name in dict.fromkeys(name for row in rows for name in row):
        numbers = numbers_in([row.get(name) for row in rows])
        if len({*map(type, numbers)}) == 2 and max(map(abs, numbers)) > 2**53:
            names.append(name)
    return names


def check_file(folder, seed, monkeypatch):
    """Write random rows, read them as a job does, and return whether they were refused."""
    rng = random.Random(seed)
    rows = drawn_rows(rng)
    # sometimes in two files, which are read with the same types
    cut = rng.randrange(len(rows)) if rng.random() < 0.3 else 0
    for name, part in (("a", rows[:cut]), ("b", rows[cut:])):
        if part:
            write_lines(folder / name, part, rng)
    block_bytes = rng.choice([40, 200, 1 << 24])
    for name in ("scan_json_lines", "read_json_lines"):
        with_blocks = partial(getattr(json_lines, name), block_bytes=block_bytes)
        monkeypatch.setattr(file_slices, name, with_blocks)
    try:
        source = scan_source(str(folder))
        tables = [table for task in source.tasks() for table in source.read(task)]
    except ConfigError as caught:
        message = str(caught)
    else:
        message = ""
    if message:
        where = r"source file \S+[ab]\.jsonl(\.gz)?(, line \d+: | does not .* column '.*')"
        assert re.search(where, message), message
        named = [name for name in may_misfit(rows) if f"column {name!r}" in message]
        assert named, f"seed {seed}: {message}"
        return True
    assert not misfits(rows), f"seed {seed}"
    for table in tables:
        table.validate(full=True)
    lines = {field.name: field.type for part in source.slices for field in part.schema}
    texts = [name for name, kind in lines.items() if kind == json_lines.JSON_TEXT]
    seen = [row for table in tables for row in read_texts(table, texts)]
    assert exactly(without_nulls(seen)) == exactly(without_nulls(rows)), f"seed {seed}"
    return False


def check_files(folder, seeds, monkeypatch):
    refused = 0
    for seed in seeds:
        with monkeypatch.context() as patched:
            refused += check_file(folder, seed, patched)
        for path in folder.iterdir():
            path.unlink()
    # most are read, so that the comparison is one
    assert refused < 0.4 * len(seeds)


@pytest.mark.timeout(600)
def test_random_lines_are_read_as_json_loads_reads_them(tmp_path, monkeypatch):
    check_files(tmp_path, range(400), monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_ten_thousand_random_files_are_read_as_json_loads_reads_them(tmp_path, monkeypatch):
    check_files(tmp_path, range(400, 10_400), monkeypatch)
