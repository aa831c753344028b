#!/bin/sh
# Makes a machine that has been let in a node of the manager's Ray cluster, and ends when the node
# ends. The join client starts it (agent/machine/join).
#
# Given by the environment:
#   SPOT_MACHINE_ID   what the cloud calls this machine
#   SPOT_HEAD         address of the Ray head, host:port
#   SPOT_ADDRESS      the machine's own private address
#   SPOT_SLOTS        how many workers it has room for
#   RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH   how it proves that it belongs: the file with the token
#   SPOT_TEMP_DIR     where Ray puts its sockets and logs; at most 42 characters (optional)
#   SPOT_OBJECT_STORE_BYTES         memory for Ray's object store (optional)
set -eu

for name in SPOT_MACHINE_ID SPOT_HEAD SPOT_ADDRESS SPOT_SLOTS RAY_AUTH_TOKEN_PATH; do
    eval "value=\${$name:-}"
    if [ -z "$value" ]; then
        echo "boot: $name is not set; the join door has to hand it out" >&2
        exit 64
    fi
done
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
# Ray serves its metrics on all interfaces and does not ask for the token, so they are off.
export RAY_enable_metrics_collection=0
# When memory runs out Ray would end the agent, the only process here that it can end, and with it
# the whole machine. The kernel ends the script that takes the memory.
export RAY_memory_monitor_refresh_ms=0

# Workers take any free port: several machines may share one host, and a fixed range would clash.
# The machine's own resource pins actors to it; a thousand of them, so that none ever waits for it.
exec ray start --block \
    --address="$SPOT_HEAD" \
    --node-ip-address="$SPOT_ADDRESS" \
    --num-cpus="$SPOT_SLOTS" \
    --resources="{\"machine:$SPOT_MACHINE_ID\": 1000}" \
    --temp-dir="${SPOT_TEMP_DIR:-/tmp/ray}" \
    --object-store-memory="${SPOT_OBJECT_STORE_BYTES:-104857600}" \
    --min-worker-port=0 \
    --max-worker-port=0 \
    --dashboard-agent-listen-port=0 \
    --include-log-monitor=false \
    --disable-usage-stats \
    --log-color=false
