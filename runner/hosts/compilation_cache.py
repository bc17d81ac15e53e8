"""Persistent compilation cache of runs, so that a repeated start compiles less.

JAX keeps compiled programs in a folder, by a hash of the program, the compiler
and its options. It does not hash the features of the CPU, and a program that
was compiled for another CPU may stop with an illegal instruction; so each
version of JAX and each kind of CPU has its own folder:

  $XDG_CACHE_HOME/paxon/compilations/<jax version>-<hash of the CPU>

JAX's own settings come first: JAX_COMPILATION_CACHE_DIR sets another folder,
and JAX_ENABLE_COMPILATION_CACHE=false compiles everything.
"""

from collections.abc import Mapping
import hashlib
import pathlib
import platform
from typing import Any

_CPU_FACTS = (
  "vendor_id",
  "cpu family",
  "model",
  "stepping",
  "flags",
  "Features",
)
_MIN_TIME = "jax_persistent_cache_min_compile_time_secs"
# Bytes of a folder; the oldest programs are removed.
MAX_SIZE = 2**31


def enable(environ: Mapping[str, str]) -> None:
  """Enables the cache, unless JAX has a setting or several processes run.

  Compilers of several processes exchange what they find, so one must not skip
  what the others wait for.
  """
  import jax

  # JAX defines its settings at run time.
  config: Any = jax.config
  is_set = config.jax_compilation_cache_dir is not None
  if is_set or not config.jax_enable_compilation_cache:
    return
  if jax.distributed.is_initialized():
    return
  try:
    folder = find_folder(environ, jax.__version__)
    folder.mkdir(parents=True, exist_ok=True)
    remove_oldest(folder, MAX_SIZE)
  except (OSError, RuntimeError):
    # A read-only home, or a user without one; a run needs no cache.
    return
  config.update("jax_compilation_cache_dir", str(folder))
  if _MIN_TIME.upper() not in environ:
    # Dozens of small programs take as long as the train step.
    config.update(_MIN_TIME, 0.0)


def find_folder(environ: Mapping[str, str], version: str) -> pathlib.Path:
  """Returns the folder of this version of JAX and of this machine's CPU."""
  home = environ.get("XDG_CACHE_HOME")
  cache = pathlib.Path(home) if home else pathlib.Path.home() / ".cache"
  cpu = hashlib.sha256(describe_cpu().encode()).hexdigest()[:12]
  return cache / "paxon" / "compilations" / f"{version}-{cpu}"


def describe_cpu(path: str = "/proc/cpuinfo") -> str:
  """Returns the lines that identify the instructions of this CPU."""
  lines = [platform.machine(), platform.system()]
  try:
    text = pathlib.Path(path).read_text()
  except OSError:
    return "\n".join((*lines, platform.processor()))
  # One processor; cores differ in frequency only.
  for line in text.split("\n\n")[0].splitlines():
    name, _, value = line.partition(":")
    if name.strip() in _CPU_FACTS:
      lines.append(f"{name.strip()}:{value.strip()}")
  return "\n".join(lines)


def remove_oldest(folder: pathlib.Path, max_size: int) -> None:
  """Removes the oldest files until the rest has at most `max_size` bytes."""
  files = []
  for path in folder.iterdir():
    try:
      status = path.stat()
    except FileNotFoundError:
      # Another run removed it.
      continue
    files.append((status.st_mtime, status.st_size, path))
  total = sum(size for _, size, _ in files)
  for _, size, path in sorted(files, key=lambda file: file[0]):
    if total <= max_size:
      break
    path.unlink(missing_ok=True)
    total -= size
