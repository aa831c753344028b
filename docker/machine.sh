#!/bin/sh
# Makes a fresh Ubuntu a machine image: machine.sh REQUIREMENTS WHEEL. Run as root, by machine.pkr.json.
#
# /opt/spot/bin/python is where the first-boot script of every machine looks. Python has the version
# that the manager's image has, because Ray refuses nodes of others.
set -eu

requirements="$1"
wheel="$2"
python_version="3.11.13"
uv_version="0.13.9"
build="$(mktemp -d)"

apt-get update
apt-get install --yes --no-install-recommends python3-venv ca-certificates
python3 -m venv "$build"
"$build/bin/pip" install --no-cache-dir "uv==$uv_version"
UV_PYTHON_INSTALL_DIR="/opt/python"
export UV_PYTHON_INSTALL_DIR
"$build/bin/uv" venv --managed-python --python "$python_version" "/opt/spot"
# Compiled, because a machine imports all of it in its first seconds.
"$build/bin/uv" pip install --no-cache --compile-bytecode --python "/opt/spot/bin/python" --requirement "$requirements"
"$build/bin/uv" pip install --no-cache --compile-bytecode --python "/opt/spot/bin/python" --no-deps "$wheel"

# What a machine does first has to work before anything is sold on it.
"/opt/spot/bin/python" -P -m agent.machine.join --help > /dev/null
"/opt/spot/bin/python" -P -c "import torch, ray"

rm -rf "$build" /var/lib/apt/lists/*
# Every machine of this image is another one: it has its own keys, and no user data of the builder.
rm -f /etc/ssh/ssh_host_* /root/.ssh/authorized_keys
cloud-init clean --logs
