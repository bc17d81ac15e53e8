"""Starts {main} with a module search path that holds declared things only."""

import importlib
import os
import runpy
import sys

# XLA calls LAPACK from its own threads, as many as there are cores. Those that
# OpenBLAS adds spin while they wait: with another program on the same cores the
# first step of SOAP took 30 s, and one second without them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# XLA's CPU backend takes its temporaries from malloc in each step and gives them
# back; huge pages spare it a fault for each 4 kB (docs/design/0011-bench.md).
# The C library reads this when a process starts, so it starts once more.
if "GLIBC_TUNABLES" not in os.environ:
  os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
  os.execv(sys.executable, sys.orig_argv)

# Python puts the folder of the file that it starts, in the source tree, first
# on the path: siblings nobody declared, and names of the standard library.
if not sys.flags.safe_path:
  del sys.path[0]
os.environ["PYTHONSAFEPATH"] = "1"

# Bazel puts the workspace itself there too, which would make `import layers` a
# second copy of `paxon.layers`.
_root = importlib.import_module("paxon").__path__[0]
sys.path[:] = [entry for entry in sys.path if entry != _root]
os.environ["PYTHONPATH"] = os.pathsep.join(
  entry
  for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
  if entry != _root
)

# The generated packages of tools/root_package.bzl have a path, in which `--list`
# searches, once they are imported.
for _entry in sys.path:
  if os.path.basename(_entry) == "_import_root":
    # Bazel itself may add an `__init__.py` there.
    for _name in os.listdir(_entry):
      if os.path.isdir(os.path.join(_entry, _name)):
        importlib.import_module(_name)

# tools/bazelw, called from outside the workspace, says where the user stands;
# Bazel itself knows only where it was started.
if directory := os.environ.pop("PAXON_WORKING_DIRECTORY", ""):
  os.environ["BUILD_WORKING_DIRECTORY"] = directory

runpy.run_path(
  os.path.join(os.path.dirname(os.path.abspath(__file__)), "{main}"),
  run_name="__main__",
)
