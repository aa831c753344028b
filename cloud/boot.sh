#!/bin/sh
# First-boot script of every instance: makes the machine a node of the manager's Ray cluster, and
# ends when the node ends, so that a machine that lost its manager does not go on costing money.
# What the environment has to give is in the module's own text.
exec python -P -m agent.boot.node
