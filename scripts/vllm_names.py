"""Compare a version of vLLM with what raybatch uses of it, without installing or importing it.

    python scripts/vllm_names.py 0.34.0            # which names are gone, which options are new
    python scripts/vllm_names.py 0.34.0 --write    # keep the names for the tests

The version is downloaded from the package index (about 350 MB); `--source` names a folder or a
wheel of vLLM instead. The adapter is that of the minor version, or the newest one. Names and
signatures are read from the sources. For attributes the script checks only whether any class of
vLLM has them. It does not check what a function does with its arguments: the tests on a real vLLM
do.

`--write` stores the names in `tests/backends/data/vllm_names.json`, and the options and parsers of
the newest version in `raybatch/backends/vllm/names.json`. Exits with 1 if a used name is gone.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from raybatch.backends.vllm.adapter import Adapter
from raybatch.backends.vllm.versions import ADAPTERS

ROOT = Path(__file__).parent.parent
OPTIONS = ROOT / "raybatch" / "backends" / "vllm" / "names.json"
NAMES = ROOT / "tests" / "backends" / "data" / "vllm_names.json"
# folders of vLLM whose classes have the attributes that adapters read
_ROOMS = ("v1/", "config/", "renderers/", "parser/", "multimodal/")
_ANY = "**"
_GLIBC = ("manylinux1", "manylinux_2_28", "manylinux_2_31", "manylinux_2_34", "manylinux_2_35")

# the module that defines a name, and the statement
_Found = tuple[str, ast.stmt]


class Sources:
    """Finds names in the modules of one vLLM; `read` returns the text of one of `files`."""

    def __init__(self, files: list[str], read: Callable[[str], str]) -> None:
        self._files = {name for name in files if name.endswith(".py")}
        self._read = read
        self.tree = cache(self._tree)

    def find(self, place: str) -> _Found | None:
        """Return where "module:name" is defined, following the imports of the module."""
        module, _, name = place.partition(":")
        tree = self.tree(module)
        if tree is None or not name:
            return None if tree is None else (module, ast.Pass())
        imported = None
        for node in _statements(tree.body):
            if name in _defined(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    if (each.asname or each.name) == name:
                        imported = f"{self._origin(module, node)}:{each.name}"
        return None if imported is None else self.find(imported)

    def arguments(self, found: _Found, method: str = "") -> list[str] | None:
        """Return the parameters of a function, class or method; None if the method is missing."""
        module, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return _parameters(node, is_method=False)
        if not isinstance(node, ast.ClassDef):
            return None if method else [_ANY]
        own = [each for each in node.body if getattr(each, "name", None) == (method or "__init__")]
        if own and isinstance(own[-1], ast.FunctionDef | ast.AsyncFunctionDef):
            return _parameters(own[-1], is_method=True)
        fields: list[str] = []
        for base in node.bases:
            above = self.find(f"{module}:{ast.unparse(base).partition('[')[0]}")
            if above is not None and (taken := self.arguments(above, method)) is not None:
                if method or _has_init(above[1]):
                    return taken
                fields += taken
        if method:
            return None
        return fields + [name for each in node.body for name in _field(each)]

    def attributes(self) -> set[str]:
        """Return all names that modules of vLLM's engine define, or set on objects."""
        names: set[str] = set()
        for file in self._files:
            if file.removeprefix("vllm/").startswith(_ROOMS):
                for node in ast.walk(ast.parse(self._read(file))):
                    names.update(_defined(node))
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        names.add(node.attr)
        return names

    def options(self) -> dict[str, list[str]]:
        """Return the options of the engine and the names of parsers, each sorted."""
        found = self.find("vllm.engine.arg_utils:EngineArgs")
        assert found is not None, "vLLM has no EngineArgs"
        names = self.arguments(found) or []
        return {
            "engine_args": sorted(name for name in names if not name.startswith("_")),
            "reasoning_parsers": self._keys("vllm.reasoning:_REASONING_PARSERS_TO_REGISTER"),
            "tool_parsers": self._keys("vllm.tool_parsers:_TOOL_PARSERS_TO_REGISTER"),
        }

    def load_formats(self) -> list[str]:
        return self._keys("vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER")

    def _keys(self, place: str) -> list[str]:
        found = self.find(place)
        assert found is not None, f"vLLM has no {place}"
        value = getattr(found[1], "value", None)
        assert isinstance(value, ast.Dict), place
        return sorted(str(ast.literal_eval(key)) for key in value.keys if key is not None)

    def _tree(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in self._files:
                return ast.parse(self._read(file))
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return str(node.module)
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._files
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, with those under `if` and `try`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, part, []))


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _field(node: ast.stmt) -> list[str]:
    is_field = isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
    return _defined(node) if is_field else []


def _has_init(node: ast.stmt) -> bool:
    return "__init__" in [getattr(each, "name", "") for each in getattr(node, "body", ())]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> list[str]:
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    is_static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
    names = names[1:] if is_method and not is_static else names
    return [*names, _ANY] if given.kwarg else names


def used_of(adapter: Adapter) -> dict[str, Any]:
    """Return the names that an adapter uses: places, calls with their arguments, attributes."""
    names = {name: place for part in adapter.names.values() for name, place in part.items()}
    read = [getattr(adapter, name) for name in vars(adapter) if name.startswith("read")]
    return {
        "places": sorted(set(names.values())),
        "calls": {
            f"{names[call.partition('.')[0]]}.{call.partition('.')[2]}".rstrip("."): needed.split()
            for call, needed in adapter.arguments.items()
        },
        "attributes": sorted({name for path in " ".join(read).split() for name in path.split(".")}),
    }


def names_of(sources: Sources, used: Mapping[str, Any]) -> dict[str, Any]:
    """Return the used names that a vLLM has, in the same form."""
    calls = {}
    for call, needed in used["calls"].items():
        place, method = _parts_of(call)
        if place.count(":"):
            found = sources.find(place)
            taken = None if found is None else sources.arguments(found, method)
        else:  # a function of a module
            found = sources.find(f"{place}:{method}")
            taken = None if found is None else sources.arguments(found)
        if taken is not None:
            calls[call] = [name for name in taken if name in (*needed, _ANY)]
    return {
        "places": [place for place in used["places"] if sources.find(place) is not None],
        "calls": calls,
        "attributes": sorted(sources.attributes().intersection(used["attributes"])),
        "load_formats": sources.load_formats(),
    }


def _parts_of(call: str) -> tuple[str, str]:
    """Return the place of a call, and the name of a method or of a function of a module."""
    module, colon, name = call.partition(":")
    if colon:
        name, _, method = name.partition(".")
        return f"{module}:{name}", method
    module, _, name = call.rpartition(".")
    return module, name


def gone(adapter: Adapter, names: Mapping[str, Any]) -> list[str]:
    """Return the names that an adapter uses and a vLLM lacks, a message each."""
    used = used_of(adapter)
    missing = [f"no {place}" for place in used["places"] if place not in names["places"]]
    for call, needed in used["calls"].items():
        taken = names["calls"].get(call)
        if taken is None and call not in used["places"]:
            missing.append(f"no {call}")
        elif taken is not None and _ANY not in taken:
            missing += [f"{call} takes no {name}" for name in needed if name not in taken]
    absent = set(used["attributes"]).difference(names["attributes"])
    missing += [f"no class has an attribute {name}" for name in sorted(absent)]
    formats = set(adapter.load_formats.split())
    return missing + [f"no load_format {n}" for n in sorted(formats - set(names["load_formats"]))]


def adapter_for(version: str) -> Adapter:
    """Return the adapter of the minor version, or the newest one."""
    newest = list(ADAPTERS.values())[-1]
    return ADAPTERS.get(".".join(version.split(".")[:2]), newest)


def sources_of(place: Path) -> Sources:
    """Return the sources in a wheel, or in a folder that holds `vllm`."""
    if place.is_dir():
        files = [path.relative_to(place).as_posix() for path in place.glob("vllm/**/*.py")]
        return Sources(files, lambda name: (place / name).read_text(encoding="utf-8"))
    wheel = zipfile.ZipFile(place)
    return Sources(wheel.namelist(), lambda name: wheel.read(name).decode())


def _download(version: str, folder: str) -> Path:
    platforms = [f"--platform={name}_x86_64" for name in _GLIBC]
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={folder}", *options]
    subprocess.run([*command, f"vllm=={version}"], check=True)
    (wheel,) = Path(folder).glob("vllm-*.whl")
    return wheel


def _write(version: str, names: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    kept = json.loads(NAMES.read_text(encoding="utf-8")) if NAMES.exists() else {}
    kept = dict(sorted({**kept, version: names}.items()))
    NAMES.parent.mkdir(exist_ok=True)
    text = json.dumps(kept, indent=1)
    # write each list of names on one line
    text = re.sub(r"\[([^\[\]{}]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    NAMES.write_text(text + "\n", encoding="utf-8")
    if version == list(kept)[-1]:
        text = json.dumps({"version": version, **options}, indent=1)
        OPTIONS.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="such as 0.34.0; with --source, any name for it")
    parser.add_argument("--source", type=Path, help="a wheel, or a folder that holds vllm/")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    adapter = adapter_for(given.version)
    with tempfile.TemporaryDirectory() as folder:
        sources = sources_of(given.source or _download(given.version, folder))
        names, options = names_of(sources, used_of(adapter)), sources.options()
    missing = gone(adapter, names)
    known = json.loads(OPTIONS.read_text(encoding="utf-8"))
    print(f"vLLM {given.version} lacks {len(missing)} names that versions.py uses")
    for line in missing:
        print(f"  {line}")
    for kind, listed in options.items():
        for what, some in (
            ("new", set(listed) - set(known[kind])),
            ("gone", set(known[kind]) - set(listed)),
        ):
            print(f"{kind}, {what} since {known['version']}: {', '.join(sorted(some)) or 'none'}")
    if given.write:
        _write(given.version, names, options)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
