#!/bin/sh
# Makes a machine that has been let in a node of the manager's Ray cluster, and ends when the node
# ends. What the environment has to give is in the module's own text.
set -eu
exec python -P -m agent.boot.node
