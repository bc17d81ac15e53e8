"""Profile-guided latency estimation (PGLE): a step compiled by a profile of it.

The latency hiding scheduler of XLA places collectives by how long it believes
that instructions take; a profile says how long they did. JAX's own automatic
way (`jax_enable_pgle`) recompiles inside of `jax.jit` and never touches a step
that is compiled ahead, so it is done here: after a few steps the loop profiles
some, takes the times of instructions out of the trace, and compiles the same
traced step again with them. What is profiled is compiled without CUDA graphs,
which a trace shows as one instruction each. Where the folder has a profile of
this very program, as when a run goes on, it is used from the first step.

Compilers for NVIDIA GPUs take profiles; elsewhere nothing happens but a line
that says so. What is computed is the same; what runs when is not.
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

AUTO: Final = "auto"
# Steps that run before the profile: the first ones wait for data and caches.
WARMUP_STEPS: Final = 5
PROFILED_STEPS: Final = 3

_OPTION: Final = "fdo_profile"
_PLATFORMS: Final = ("cuda", "gpu")
# As JAX's own way compiles what it profiles.
_PROFILED: Final = types.MappingProxyType({"xla_gpu_enable_command_buffer": ""})


def _extract(folder: str) -> bytes:
  """Returns the times of instructions in the trace below a folder."""
  (run,) = epath.Path(folder).glob("plugins/profile/*")
  return profiler.get_profiled_instructions_proto(os.fspath(run))


@dataclasses.dataclass(kw_only=True, eq=False)
class ProfileGuide:
  """Profiles the first steps of a loop, and knows what to compile with.

  Attributes:
    setting: `auto`, or the path of a profile.
    folder: Where the automatic way keeps its profiles.
    platform: Of the devices, as JAX calls it.
    extract: Reads a trace; another one in tests.
    say: Is told which program runs.
  """

  setting: str
  folder: epath.Path
  platform: str
  extract: Callable[[str], bytes] = _extract
  say: Callable[[str], None] = print

  def __post_init__(self) -> None:
    self._steps = 0
    self._profile: bytes | None = None
    self._kept: epath.Path | None = None
    self._trace: tempfile.TemporaryDirectory[str] | None = None
    self._is_done = False

  def options(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
    """Returns compiler options: to give a program its profile, or to get one.

    Args:
      lowered: The program, by which a profile in the folder is found again.

    Raises:
      UserError: The profile that was given cannot be read.
    """
    if self.platform not in _PLATFORMS:
      if not self._is_done:
        self.say(
          f"pgle: left out, because compilers for {self.platform} take no"
          " profile"
        )
      self._is_done = True
      return {}
    if not self._is_done:
      self._find(lowered)
    if self._profile is not None:
      return {_OPTION: self._profile}
    return {} if self._is_done else dict(_PROFILED)

  def after_step(self, outputs: Any) -> bool:
    """Takes in that a step was dispatched.

    Args:
      outputs: Of the step, waited for at the edges of the profile.

    Returns:
      Whether to compile anew, because the profile is done.
    """
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
    """Looks for a profile that is there already."""
    if self.setting != AUTO:
      self._profile = _read(epath.Path(self.setting))
      self._is_done = True
      self.say(f"pgle: compiled by the profile {self.setting}")
      return
    digest = hashlib.sha256((lowered.as_text() or "").encode()).hexdigest()
    self._kept = self.folder / f"{digest[:16]}.pb"
    # The folder of the first process counts: others may not see it yet.
    kept = self._kept
    self._profile = _from_first(lambda: _read(kept) if kept.exists() else b"")
    if self._profile is not None:
      self._is_done = True
      self.say(f"pgle: compiled by the profile {os.fspath(self._kept)}")
      return
    last = WARMUP_STEPS + PROFILED_STEPS
    self.say(
      "pgle: compiled without a profile and CUDA graphs; of the next steps"
      f" {WARMUP_STEPS + 1} to {last} are profiled"
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
    # All processes must compile by one profile, or they wait for each other
    # in different orders.
    with trace:
      self._profile = _from_first(lambda: self.extract(trace.name))
    if self._profile is None:
      self.say(
        "pgle: the profile holds no times; compiled again without it, because"
        " the program so far has no CUDA graphs"
      )
      return True
    kept = self._kept
    if kept is not None and agreement.is_first():
      kept.parent.mkdir(parents=True, exist_ok=True)
      kept.write_bytes(self._profile)
    self.say(
      f"pgle: compiled again by a profile of {PROFILED_STEPS} steps"
      f" ({len(self._profile)} bytes, kept as {os.fspath(kept or '')}); this"
      " program runs from the next step on"
    )
    return True


def check(setting: str | None) -> None:
  """Checks what a job says before anything is computed.

  Args:
    setting: `auto`, a path, or None for no profile.

  Raises:
    UserError: There is no such file.
  """
  if setting is not None and setting != AUTO:
    _read(epath.Path(setting))


def _from_first(make: Callable[[], bytes]) -> bytes | None:
  """Returns on every process what the first one made; None for no bytes."""
  text = agreement.from_first(lambda: base64.b64encode(make()).decode())
  return base64.b64decode(text) or None


def _read(path: epath.Path) -> bytes:
  try:
    found = path.read_bytes()
  except OSError as error:
    raise user_error.UserError(
      f"Job.pgle: the profile {os.fspath(path)} cannot be read"
      f" ({error.strerror or error}); give a file that a run with pgle='auto'"
      " has kept in the folder pgle, or auto."
    ) from error
  if not found:
    raise user_error.UserError(
      f"Job.pgle: the profile {os.fspath(path)} is empty."
    )
  return found
