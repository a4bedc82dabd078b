#!/bin/bash
# Starts a Ray cluster of its own, runs a command on it and ends it. Started on every host at once:
#   ray_cluster.sh HEAD:PORT RANK NUM_HOSTS COMMAND...
# Rank 0 is HEAD and runs the command, whose exit code it returns; SIGTERM is passed on to it.
# RAY_AUTH_TOKEN, any secret text, has to be the same on all hosts. Ports are PORT and the nine
# behind it, so that other clusters on these hosts are left alone.
set -euo pipefail

if (($# < 4)); then
    echo "usage: $0 HEAD:PORT RANK NUM_HOSTS COMMAND..." >&2
    exit 2
fi
address=$1 rank=$2 num_hosts=$3
shift 3
port=${address##*:}
: "${RAY_AUTH_TOKEN:?set it to a secret text, the same on all hosts}"
export RAY_AUTH_MODE=token
start=(
    ray start --block --disable-usage-stats --temp-dir="/tmp/ray-$UID-$port"
    --node-manager-port=$((port + 1)) --object-manager-port=$((port + 2))
    --dashboard-agent-listen-port=$((port + 3)) --dashboard-agent-grpc-port=$((port + 4))
    --runtime-env-agent-port=$((port + 5)) --metrics-export-port=$((port + 6))
)

if ((rank > 0)); then
    # ends when the head does, also where a signal goes to all hosts
    trap '' TERM
    until (exec 3<>"/dev/tcp/${address%:*}/$port") 2>/dev/null; do sleep 1; done
    "${start[@]}" --address="$address" || true
    exit 0
fi

# setsid: a signal to the whole job must not end Ray before the command has kept its rows
setsid "${start[@]}" --head --port="$port" --ray-client-server-port=$((port + 7)) \
    --include-dashboard=false --dashboard-port=$((port + 8)) &
head=$!
trap 'kill -TERM "$head" 2>/dev/null || true; wait "$head" || true' EXIT

python - "$address" "$num_hosts" <<'PYTHON'
import sys
import time

import ray

address, num_hosts = sys.argv[1], int(sys.argv[2])
until = time.monotonic() + 600
while True:
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        joined = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        joined = 0
    if joined >= num_hosts:
        break
    if time.monotonic() > until:
        sys.exit(f"after ten minutes {joined} of {num_hosts} hosts have joined {address}")
    time.sleep(1)
PYTHON

RAY_ADDRESS=$address setsid "$@" &
command=$!
trap 'trap "" TERM; kill -TERM "$command" 2>/dev/null || true' TERM
code=0
wait "$command" || code=$?
# a signal ends the first wait, not the command
while kill -0 "$command" 2>/dev/null; do
    code=0
    wait "$command" || code=$?
done
exit "$code"
