#!/bin/sh
# Runs the manager and all that belongs to it, in the foreground, in the folder it is started in.
#
# Given by the environment, all optional:
#   SPOT_ADDRESS   the machine's private address, on which instances join
#   ORCHESTRATOR__SECTION__KEY   any setting of orchestrator.toml
set -eu

if [ ! -e orchestrator.toml ]; then
    orchestrator init
fi
if [ -n "${SPOT_ADDRESS:-}" ]; then
    export ORCHESTRATOR__RAY__HEAD_ADDRESS="$SPOT_ADDRESS"
fi
exec python -m orchestrator.supervisor --config orchestrator.toml
