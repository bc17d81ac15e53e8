"""A program compiled for a target: its memory, kernels and estimated time."""

from collections.abc import Mapping
import dataclasses
import hashlib
import os
import re
import time

import jax

from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import (
  hardware,
  kernel_contract,
  network,
  peak_buffers,
  result,
)
from paxon.runner.plan import quantized_matmuls as quantized_matmuls_lib
from paxon.runner.plan import target as targets
from paxon.runner.plan.estimate import efficiency, prediction
from paxon.runner.plan.program_text import buffer_assignment, hlo
from paxon.runner.plan.program_text import reading as reading_lib
from paxon.runner.planning import other_programs
from paxon.runner.session import session as session_lib
from paxon.sharding import axes
from paxon.sharding import mesh as meshes

_SOURCE = re.compile(r",? ?metadata=\{[^}]*\}")


def without_sources(text: str) -> str:
  """Returns a compiled text without names of files, lines and operations."""
  # Tables of files and lines stand before the first computation.
  begin = re.search(r"^(?:ENTRY )?%", text, re.MULTILINE)
  return _SOURCE.sub("", text[begin.start() if begin else 0 :])


class Program:
  """A compiled program; empty until it is compiled."""

  def __init__(
    self, target: targets.Target, session: session_lib.Session
  ) -> None:
    self._target = target
    self._mesh = session.layout.mesh
    self._session = session
    full = meshes.MeshSpec.parse(session.job.mesh).resolve(self._mesh.size)
    self._dcn = [axis for axis in axes.MESH_AXES if full.dcn[axis] > 1]
    self._batch_axes = _axes_of_rows(session.batch)
    self.is_compiled = False
    self.placement = network.Placement(domains=(0,) * self._mesh.size)
    self.reading = reading_lib.NOTHING
    self.fingerprint: str | None = None
    self.seconds: float | None = None
    self.traffic: float | None = None
    self.notes: list[str] = []
    self._text: hlo.Program | None = None
    self.kernel_choices: tuple[result.KernelChoice, ...] = ()

  def compile(
    self,
    traced: jax.stages.Traced,
    memory: result.Memory,
    flops: flops_lib.Flops,
  ) -> result.Memory:
    """Compiles and reads; returns the memory as the compiler sees it."""
    begin = time.monotonic()
    try:
      compiled, buffers = other_programs.compile_program(
        self._session, self._target, traced
      )
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      self.seconds = time.monotonic() - begin
      return dataclasses.replace(
        memory, compiler_error=str(error).splitlines()[0]
      )
    self.seconds = time.monotonic() - begin
    self.is_compiled = True
    text = compiled.as_text() or ""
    stripped = without_sources(text).encode()
    self.fingerprint = hashlib.sha256(stripped).hexdigest()
    self.placement = network.place(self._target, list(self._mesh.devices.flat))
    self._read(text, flops)
    sizes = compiled.memory_analysis()
    assert sizes is not None
    self.traffic = float(
      sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    )
    platform = self._target.hardware.platform
    peak = other_programs.peak(sizes, platform, buffers)
    if platform is hardware.Platform.TPU:
      # Its compiler checks the memory: what it accepts fits.
      peak = round(min(peak, memory.usable or peak))
    return dataclasses.replace(
      memory,
      arguments=sizes.argument_size_in_bytes,
      temporaries=sizes.temp_size_in_bytes,
      host=other_programs.host_bytes(sizes),
      peak=peak,
      at_peak=self._describe(buffers),
    )

  def _describe(
    self, buffers: buffer_assignment.Buffers | None
  ) -> tuple[result.Buffers, ...]:
    """Names the largest buffers at the peak, if they could be read."""
    program = self._text
    if buffers is None or program is None:
      return ()
    return reading_lib.attempt(
      "Buffers at the peak",
      lambda: peak_buffers.describe(buffers, program),
      (),
      self.notes,
    )

  def _read(self, text: str, flops: flops_lib.Flops) -> None:
    """Reads the compiled text; a reader that fails leaves a note."""
    platform = self._target.hardware.platform
    self._text = reading_lib.attempt(
      "The compiled program", lambda: hlo.parse(text), None, self.notes
    )
    program = self._text
    if program is None:
      return
    self.kernel_choices = reading_lib.attempt(
      "Kernels",
      lambda: kernel_contract.choices(
        program, is_tuned=platform is not hardware.Platform.CUDA
      ),
      (),
      self.notes,
    )
    self.reading = reading_lib.read(
      program,
      mesh=dict(self._mesh.shape),
      dcn=self._dcn,
      batch_axes=self._batch_axes,
      platform=platform.value,
      traced=flops.count_by("part"),
    )

  def quantized_matmuls(
    self, flops: flops_lib.Flops
  ) -> tuple[result.QuantizedMatmul, ...]:
    """Returns the kernel and dtype of each quantized matmul."""
    return reading_lib.attempt(
      "Quantized matmuls",
      lambda: quantized_matmuls_lib.find_quantized_matmuls(
        flops,
        self._text,
        kind=self._target.hardware,
        num_devices=self._mesh.size,
      ),
      (),
      self.notes,
    )

  def estimate(
    self, flops: flops_lib.Flops, batch_shape: tuple[int, ...] | None
  ) -> tuple[result.Estimate | None, tuple[str, ...]]:
    """Returns the estimate of the step's time, and why there is none."""
    program, kind = self._text, self._target.hardware
    is_read = all(
      reading_lib.COULD_NOT_READ not in note for note in self.reading.notes
    )
    if program is None or not is_read:
      return None, ()
    factors = efficiency.choose(kind, os.environ)
    notes: list[str] = []
    found, reasons = reading_lib.attempt(
      "The step's time",
      lambda: prediction.estimate_step(
        program,
        communication=self.reading.communication,
        placement=self.placement,
        kind=kind,
        efficiency=factors,
        flops=flops,
        batch_shape=batch_shape,
      ),
      (None, ()),
      notes,
    )
    return found, (*reasons, *notes)


def _axes_of_rows(batch: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
  """The mesh axes over which a batch is split."""
  found: dict[str, None] = {}
  for array in batch.values():
    spec = getattr(array.sharding, "spec", None) or (None,)
    rows = spec[0] or ()
    found |= dict.fromkeys((rows,) if isinstance(rows, str) else rows)
  return list(found)
