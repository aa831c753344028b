#!/bin/sh
# Finds out what machine this is and makes it a node of the manager's cluster.
#
# Given by the environment, as the launch handed it to the machine:
#   SPOT_HEAD, RAY_AUTH_TOKEN            where to join, and the proof of belonging
#   SPOT_MACHINE_ID, SPOT_ADDRESS, SPOT_SLOTS   found out here if not given
#   SPOT_METADATA_URL                    where notices come from (optional; the clouds' own address)
#   SPOT_IDENTITY                        the program that finds out (optional)
# It ends when the node ends; whoever started it switches the machine off then.
set -eu

if [ -z "${SPOT_HEAD:-}" ]; then
    echo "instance: SPOT_HEAD is not set; the launch must hand it to the machine" >&2
    exit 64
fi
identity="${SPOT_IDENTITY:-/usr/local/lib/spot/identity.py}"

SPOT_MACHINE_ID="${SPOT_MACHINE_ID:-$(python "$identity" machine)}"
SPOT_ADDRESS="${SPOT_ADDRESS:-$(python "$identity" address "$SPOT_HEAD")}"
if [ -z "${SPOT_SLOTS:-}" ]; then
    # One worker for each accelerator; a machine without any works as one.
    SPOT_SLOTS="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
    if [ "$SPOT_SLOTS" = 0 ]; then
        SPOT_SLOTS=1
    fi
fi
# The agent watches for notices where this says.
SPOT_METADATA_URL="${SPOT_METADATA_URL:-http://169.254.169.254}"
export SPOT_HEAD SPOT_MACHINE_ID SPOT_ADDRESS SPOT_SLOTS SPOT_METADATA_URL

boot="$(python -c 'import cloud; print(cloud.__path__[0])')/boot.sh"
exec sh "$boot"
