"""The C++ compiler of this machine, which torch compiles with on a processor."""

import shutil

import pytest


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="needs a C++ compiler (Debian: apt install g++)"
)
