#!/usr/bin/env bash
# Makes the virtual environment VENV with PYTHON, or with the newest suitable Python that it finds. An
# environment that works is not changed:  scripts/make_venv.sh VENV [PYTHON]
set -euo pipefail
venv=${1:?usage: make_venv.sh VENV [PYTHON]}
wanted=${2:-}

# uv makes environments without pip
if "$venv/bin/python" -c '' 2>/dev/null &&
    { "$venv/bin/python" -m pip --version || "$venv/bin/python" -m ensurepip; } >/dev/null 2>&1; then
    echo "$venv: used as it is, with $("$venv/bin/python" --version)" >&2
    exit
fi

# the dependencies of raybatch have wheels only for these Pythons
fits='
import platform, sys, sysconfig
found = "%s (Python %s)" % (sys.executable, platform.python_version())
is_wanted = (3, 11) <= sys.version_info < (3, 15) and sys.maxsize > 2**32
is_free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
if not is_wanted or platform.python_implementation() != "CPython" or is_free_threaded:
    sys.exit(found + " is not CPython 3.11 to 3.14 of 64 bits")
try:
    import ensurepip, venv
except ImportError:
    name = "python%d.%d-venv" % sys.version_info[:2]
    sys.exit(found + " has no venv (Debian, Ubuntu: sudo apt install " + name + ")")
print(found)
'
refused=
try() {
    if ! command -v "$1" >/dev/null; then
        [ -z "$wanted" ] || refused+="  $1: not found"$'\n'
    elif found=$("$1" -c "$fits" 2>&1); then
        echo "$venv: made with $found" >&2
        exec "$1" -m venv "$venv"
    else
        refused+="  $1: $(head -n 1 <<<"$found")"$'\n'
    fi
}
if [ -n "$wanted" ]; then
    try "$wanted"
else
    for python in python3.14 python3.13 python3.12 python3.11 python3 python; do try "$python"; done
fi

cat >&2 <<END
raybatch needs CPython 3.11 to 3.14 (64 bits) with venv${wanted:+, and PYTHON names another}:
${refused:-  no Python was found
}Install one of them:
  Debian, Ubuntu:  sudo apt install python3 python3-venv   (from Debian 12 and Ubuntu 24.04 on)
  Fedora:          sudo dnf install python3.13
  macOS:           brew install python@3.13
  with uv:         uv python install 3.13
and run the same command again, or name it: make demo PYTHON=/path/of/python
END
exit 1
