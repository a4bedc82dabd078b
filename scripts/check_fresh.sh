#!/usr/bin/env bash
# Runs the README's commands as a new user does: in a clean clone whose path has a blank, with PYTHON
# as the only Python, pip without configuration, wheels or caches, and no variables but PATH and HOME
# (and those that name the network's proxy and certificates).
#   scripts/check_fresh.sh PYTHON [TARGET ...]
# Without targets: the commands of the README's section "Install and try", then `make test-fast`.
set -euo pipefail
wanted=${1:?usage: check_fresh.sh PYTHON [TARGET ...]}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
python=$("$wanted" -c 'import sys; print(sys.executable)')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# link the programs of the host, except its other Pythons, pip, uv and conda
mkdir "$work/bin" "$work/home"
IFS=: read -ra folders <<<"/usr/local/bin:/usr/bin:/bin"
for folder in "${folders[@]}"; do
    for program in "$folder"/*; do
        case ${program##*/} in python* | pip* | uv | uvx | conda) continue ;; esac
        [ -e "$work/bin/${program##*/}" ] || ln -s "$program" "$work/bin/"
    done
done
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ln -s "$python" "$work/bin/python$version"

environment=(PATH="$work/bin" HOME="$work/home" PIP_CONFIG_FILE=/dev/null PIP_NO_CACHE_DIR=1 UV_NO_CONFIG=1)
for name in PIP_CERT SSL_CERT_FILE {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY; do
    [ -z "${!name:-}" ] || environment+=("$name=${!name}")
done

[ -z "$(git -C "$root" status --porcelain)" ] || echo "fresh: the clone leaves out uncommitted changes" >&2
clone="$work/a clone"
git clone --quiet "$root" "$clone"
cd "$clone"
commands=()
for target in "$@"; do commands+=("make $target"); done
if [ $# -eq 0 ]; then
    # the first block of commands in that section
    while read -r command; do commands+=("$command"); done < <(awk '/^## /{inside = /^## Install and try/}
        inside && /^```$/ && block {exit} inside && block {print} inside && /^```console/ {block = 1}' README.md)
    commands+=("make test-fast")
fi
echo "fresh: $("$python" --version), commit $(git rev-parse --short HEAD), $(uname -sm)"
for command in "${commands[@]}"; do
    echo "fresh: \$ $command"
    began=$SECONDS
    env -i "${environment[@]}" bash -c "$command"
    echo "fresh: \$ $command: passed in $((SECONDS - began)) s, .venv has $(du -sm .venv | cut -f1) MB"
done
