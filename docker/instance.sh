#!/bin/sh
# Makes this machine a node of the manager's cluster, if the join door lets it in.
#
# Its arguments are those of the join client, as the first-boot script has them: --door,
# --fingerprint, --deployment, --cloud, --silent-after-s. It ends when the node ends, and when there
# was no word from a manager for too long; what started it ends the machine's bill then.
set -eu

exec /opt/spot/bin/python -P -m agent.machine.join "$@"
