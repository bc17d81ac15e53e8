"""A program compiled for a target: its memory, kernels and estimated time."""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import os
import pathlib
import re
import tempfile
import time
from typing import Any, Final

import jax

from paxon.runner.plan import (
  compiler_options,
  hardware,
  kernel_contract,
  network,
  peak_buffers,
  result,
  topology,
)
from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import quantized_matmuls as quantized_matmuls_lib
from paxon.runner.plan import target as targets
from paxon.runner.plan.estimate import efficiency, prediction
from paxon.runner.plan.program_text import buffer_assignment, hlo
from paxon.runner.plan.program_text import reading as reading_lib

# XLA's error for a matmul in Triton that it cannot tile, and the option to
# use cuBLAS instead.
_NO_TILES: Final = "find output tile sizes"
_TRITON: Final = "xla_gpu_enable_triton_gemm"
_SOURCE = re.compile(r",? ?metadata=\{[^}]*\}")


def without_sources(text: str) -> str:
  """Returns a compiled text without names of files, lines and operations."""
  # Tables of files and lines stand before the first computation.
  begin = re.search(r"^(?:ENTRY )?%", text, re.MULTILINE)
  return _SOURCE.sub("", text[begin.start() if begin else 0 :])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
  """Settings with which programs are compiled.

  Attributes:
    target: Its compiler must be installed.
    mesh: Of the target's devices.
    dcn: The mesh axes between slices.
    batch_axes: The mesh axes over which a batch is split.
    options: Options of the compiler, as a run would be given them.
    option_sets: Names of sets of options.
    rename: Changes names of operations in the compiled text.
  """

  target: targets.Target
  mesh: jax.sharding.Mesh
  dcn: Sequence[str] = ()
  batch_axes: Sequence[str] = ()
  options: compiler_options.Options = dataclasses.field(default_factory=dict)
  option_sets: Sequence[str] = ()
  rename: Callable[[str], str] = str

  def compile(
    self, traced: jax.stages.Traced
  ) -> tuple[jax.stages.Compiled, buffer_assignment.Buffers | None]:
    """Compiles a program.

    Args:
      traced: The program.

    Returns:
      The program, and its buffers in the memory of the device; None if what the
      compiler writes about them cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="paxon-plan-") as name:
      folder = pathlib.Path(name)
      compiled = topology.compile_for(
        self.target,
        traced,
        self.mesh,
        given=self.options,
        sets=self.option_sets,
        dump=folder,
      )
      try:
        return compiled, buffer_assignment.read(folder)
      except (buffer_assignment.ReadError, OSError, UnicodeDecodeError):
        return compiled, None


class Program:
  """A compiled program; empty until it is compiled."""

  def __init__(self, target: targets.Target) -> None:
    self._target = target
    self.is_compiled = False
    self.placement = network.Placement(domains=(0,) * target.num_devices)
    self.reading = reading_lib.NOTHING
    self.fingerprint: str | None = None
    self.seconds: float | None = None
    self.traffic: float | None = None
    self.notes: list[str] = []
    self._text: hlo.Program | None = None
    self.kernel_choices: tuple[result.KernelChoice, ...] = ()

  def compile(
    self,
    compilation: Compilation,
    traced: jax.stages.Traced,
    memory: result.Memory,
    flops: flops_lib.Flops,
  ) -> result.Memory:
    """Compiles and reads; returns the memory as the compiler sees it."""
    begin = time.monotonic()
    try:
      compiled, buffers = self._compile(compilation, traced)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      self.seconds = time.monotonic() - begin
      return dataclasses.replace(
        memory, compiler_error=str(error).splitlines()[0]
      )
    self.seconds = time.monotonic() - begin
    self.is_compiled = True
    text = compilation.rename(compiled.as_text() or "")
    stripped = without_sources(text).encode()
    self.fingerprint = hashlib.sha256(stripped).hexdigest()
    devices = list(compilation.mesh.devices.flat)
    self.placement = network.place(self._target, devices)
    self._read(compilation, text, flops)
    sizes = compiled.memory_analysis()
    assert sizes is not None
    self.traffic = float(
      sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    )
    platform = self._target.hardware.platform
    peak_bytes = peak(sizes, platform, buffers)
    if platform is hardware.Platform.TPU:
      # Its compiler checks the memory: what it accepts fits.
      peak_bytes = round(min(peak_bytes, memory.usable or peak_bytes))
    return dataclasses.replace(
      memory,
      arguments=sizes.argument_size_in_bytes,
      temporaries=sizes.temp_size_in_bytes,
      host=host_bytes(sizes),
      peak=peak_bytes,
      at_peak=self._describe(buffers),
    )

  def _compile(
    self, compilation: Compilation, traced: jax.stages.Traced
  ) -> tuple[jax.stages.Compiled, buffer_assignment.Buffers | None]:
    """Compiles, without Triton where XLA finds no tiles for a matmul."""
    try:
      return compilation.compile(traced)
    except jax.errors.JaxRuntimeError as error:
      if _NO_TILES not in str(error):
        raise
    self.notes.append(
      f"Compiled with {_TRITON}=False: without a GPU to try kernels on, XLA"
      " found no tiles for a matmul in Triton."
    )
    options = {**compilation.options, _TRITON: False}
    return dataclasses.replace(compilation, options=options).compile(traced)

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

  def _read(
    self, compilation: Compilation, text: str, flops: flops_lib.Flops
  ) -> None:
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
      mesh=dict(compilation.mesh.shape),
      dcn=compilation.dcn,
      batch_axes=compilation.batch_axes,
      platform=platform.value,
      # Unknown trips count once in a jaxpr, so there is nothing to compare.
      traced={} if flops.notes else flops.count_by("part"),
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
        num_devices=self._target.num_devices,
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


def peak(
  sizes: Any,
  platform: hardware.Platform,
  buffers: buffer_assignment.Buffers | None = None,
) -> int:
  """Returns the peak bytes of a compiled program, arguments included.

  Args:
    sizes: `memory_analysis()` of the program.
    platform: Of its compiler.
    buffers: Its buffers in the memory of the device, if known.
  """
  # Results that are not donated arguments live beside the temporaries.
  added = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  whole = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + added
  if platform is not hardware.Platform.TPU:
    return whole
  if host_bytes(sizes):
    # The compiler's peak is that of the device or of the host, whichever is
    # larger.
    if buffers is None:
      return min(whole, sizes.peak_memory_in_bytes)
    return buffers.peak
  # Less than the sum, because the compiler reuses arguments' memory.
  return sizes.peak_memory_in_bytes


def host_bytes(sizes: Any) -> int:
  """Returns the bytes of host memory of a compiled program, for a device."""
  added = sizes.host_output_size_in_bytes - sizes.host_alias_size_in_bytes
  return (
    sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes + added
  )
