"""Profile-guided latency estimation (PGLE): a step recompiled with its profile.

XLA's latency hiding scheduler places collectives by estimated instruction
times; a profile has the measured times. JAX's automatic PGLE
(`jax_enable_pgle`) recompiles inside `jax.jit` and ignores steps that are
compiled ahead of time, so it is done here: the loop profiles a few steps, reads
the instruction times from the trace, and compiles the same traced step again
with them. The profiled program is compiled without CUDA graphs, each of which a
trace shows as one instruction. A stored profile of the same program, as when a
run resumes, is used from the first step.

Only compilers for NVIDIA GPUs accept profiles; elsewhere one line is printed.
Results are the same; only the order of instructions changes.
"""

import base64
from collections.abc import Callable
import dataclasses
import hashlib
import os
import tempfile
import types
from typing import Any, Final

from etils import epath
import jax
from jax.experimental import profiler

from paxon.runner import user_error
from paxon.runner.hosts import agreement
from paxon.runner.training import hooks

AUTO: Final = "auto"
# Steps before the profile: the first ones wait for data and caches.
WARMUP_STEPS: Final = 5
PROFILED_STEPS: Final = 3

_OPTION: Final = "fdo_profile"
_PLATFORMS: Final = ("cuda", "gpu")
# As JAX's automatic PGLE compiles the profiled program.
_PROFILED: Final = types.MappingProxyType({"xla_gpu_enable_command_buffer": ""})


def _extract(folder: str) -> bytes:
  """Returns the instruction times of the trace in a directory."""
  (run,) = epath.Path(folder).glob("plugins/profile/*")
  return profiler.get_profiled_instructions_proto(os.fspath(run))


@dataclasses.dataclass(kw_only=True, eq=False)
class ProfileGuide(hooks.Hook):
  """Profiles the first steps of a loop, and gives the compiler the profile.

  Attributes:
    setting: `auto`, or the path of a profile.
    folder: Where `auto` stores its profiles.
    platform: JAX's name of the devices' platform.
    extract: Reads a trace; replaced in tests.
    log: Prints which program runs.
  """

  setting: str
  folder: epath.Path
  platform: str
  extract: Callable[[str], bytes] = _extract
  log: Callable[[str], None] = print

  def __post_init__(self) -> None:
    self._steps = 0
    self._profile: bytes | None = None
    self._kept: epath.Path | None = None
    self._trace: tempfile.TemporaryDirectory[str] | None = None
    self._is_done = False

  def find_options(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
    """Returns compiler options: with a profile, or to be profiled."""
    if self.platform not in _PLATFORMS:
      if not self._is_done:
        self.log(
          f"pgle: not used, because compilers for {self.platform} accept no"
          " profile"
        )
      self._is_done = True
      return {}
    if not self._is_done:
      self._find(lowered)
    if self._profile is not None:
      return {_OPTION: self._profile}
    return {} if self._is_done else dict(_PROFILED)

  def needs_compilation(self, outputs: Any) -> bool:
    """Counts a dispatched step; returns whether to compile with the profile."""
    if self._is_done:
      return False
    self._steps += 1
    if self._steps == WARMUP_STEPS:
      self._begin(outputs)
    elif self._steps == WARMUP_STEPS + PROFILED_STEPS:
      return self._end(outputs)
    return False

  def close(self) -> None:
    """Ends a trace that is still running."""
    if self._trace is not None:
      jax.profiler.stop_trace()
      self._trace.cleanup()
      self._trace = None
    self._is_done = True

  def _find(self, lowered: jax.stages.Lowered) -> None:
    """Looks for an existing profile."""
    if self.setting != AUTO:
      self._profile = _read(epath.Path(self.setting))
      self._is_done = True
      self.log(f"pgle: compiled with the profile {self.setting}")
      return
    digest = hashlib.sha256((lowered.as_text() or "").encode()).hexdigest()
    self._kept = self.folder / f"{digest[:16]}.pb"
    # Only the first process looks: others may not see the file yet.
    kept = self._kept
    self._profile = _from_first(lambda: _read(kept) if kept.exists() else b"")
    if self._profile is not None:
      self._is_done = True
      self.log(f"pgle: compiled with the profile {os.fspath(self._kept)}")
      return
    last = WARMUP_STEPS + PROFILED_STEPS
    self.log(
      "pgle: compiled without a profile and without CUDA graphs; profiling"
      f" steps {WARMUP_STEPS + 1} to {last} from here"
    )

  def _begin(self, outputs: Any) -> None:
    jax.block_until_ready(outputs)
    self._trace = tempfile.TemporaryDirectory(prefix="paxon-pgle-")
    jax.profiler.start_trace(self._trace.name)

  def _end(self, outputs: Any) -> bool:
    assert self._trace is not None
    jax.block_until_ready(outputs)
    jax.profiler.stop_trace()
    self._is_done = True
    trace = self._trace
    self._trace = None
    # All processes must compile with one profile: with different orders of
    # collectives they would deadlock.
    with trace:
      self._profile = _from_first(lambda: self.extract(trace.name))
    if self._profile is None:
      self.log(
        "pgle: the profile has no instruction times; compiled again without it,"
        " to have CUDA graphs"
      )
      return True
    kept = self._kept
    if kept is not None and agreement.is_first():
      kept.parent.mkdir(parents=True, exist_ok=True)
      kept.write_bytes(self._profile)
    self.log(
      f"pgle: compiled again with a profile of {PROFILED_STEPS} steps"
      f" ({len(self._profile)} bytes, stored in {os.fspath(kept or '')}), used"
      " from the next step"
    )
    return True


def check(setting: str | None) -> None:
  """Raises UserError if the file of `Job.pgle` cannot be read."""
  if setting is not None and setting != AUTO:
    _read(epath.Path(setting))


def _from_first(make: Callable[[], bytes]) -> bytes | None:
  """Returns the first process's bytes on every process, or None."""
  text = agreement.from_first(lambda: base64.b64encode(make()).decode())
  return base64.b64decode(text) or None


def _read(path: epath.Path) -> bytes:
  try:
    found = path.read_bytes()
  except OSError as error:
    raise user_error.UserError(
      f"Job.pgle: the profile {os.fspath(path)} cannot be read"
      f" ({error.strerror or error}); use 'auto', or a file that a run with"
      " pgle='auto' has stored in its directory pgle."
    ) from error
  if not found:
    raise user_error.UserError(
      f"Job.pgle: the profile {os.fspath(path)} is empty."
    )
  return found
