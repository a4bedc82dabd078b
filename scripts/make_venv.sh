#!/usr/bin/env bash
# Makes the virtual environment VENV with PYTHON, or else with the newest Python here that fits:
#   scripts/make_venv.sh VENV [PYTHON]
set -euo pipefail
venv=${1:?usage: make_venv.sh VENV [PYTHON]}
candidates=(${2:+"$2"})
[ "${#candidates[@]}" -gt 0 ] || candidates=(python3.14 python3.13 python3.12 python3.11 python3 python)

# what raybatch depends on has wheels for no other
fits='
import platform, sys, sysconfig
print(f"{sys.executable} (Python {platform.python_version()})")
wanted = (3, 11) <= sys.version_info < (3, 15) and sys.maxsize > 2**32
if not wanted or platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("is not CPython 3.11 to 3.14 of 64 bits")
try:
    import ensurepip, venv
except ImportError:
    sys.exit(f"has no venv (Debian, Ubuntu: apt install python3.{sys.version_info.minor}-venv)")
'
# a torch that is there already saves gigabytes; raybatch needs 2.10 or newer
has_torch='
import importlib.metadata, re, sys
version = importlib.metadata.version("torch")
sys.exit(tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 10))
'

refused=
for python in "${candidates[@]}"; do
    command -v "$python" >/dev/null || continue
    if found=$("$python" -c "$fits" 2>&1); then
        if "$python" -c "$has_torch" 2>/dev/null; then
            echo "$venv: made with $found and the packages there, as torch is one of them" >&2
            exec "$python" -m venv --system-site-packages "$venv"
        fi
        echo "$venv: made with $found" >&2
        exec "$python" -m venv "$venv"
    fi
    refused+="  $python: $(tail -n 1 <<<"$found")"$'\n'
done

cat >&2 <<END
raybatch needs CPython 3.11 to 3.14 (64 bits) with venv, and found none.
${refused}Install one of them:
  Debian, Ubuntu:  sudo apt install python3 python3-venv   (from Debian 12 and Ubuntu 24.04 on)
  Fedora:          sudo dnf install python3.13
  macOS:           brew install python@3.13
  with uv:         uv python install 3.13
and run the same command again, or name it: make demo PYTHON=/path/of/python
END
exit 1
