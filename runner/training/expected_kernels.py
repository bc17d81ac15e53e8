"""The kernels that a job expects, held against a compiled step."""

from collections.abc import Sequence
import functools
from typing import Any, Final, NamedTuple

import jax

from paxon.layers.attention import kernel_support
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.plan import (
  flops,
  hardware,
  kernel_contract,
  quantized_products,
  result,
)
from paxon.runner.plan.program_text import hlo
from paxon.runner.settings import expected_kernels as settings
from paxon.runner.training import attention_kernels
from paxon.runner.training import session as session_lib


class _Part(NamedTuple):
  """The parts that become a kernel: how others differ, what to set."""

  supports: tuple[kernel_support.Support, ...]
  other: str
  advice: str


_PARTS: Final = {
  settings.CUDNN: _Part(
    (
      kernel_support.CUDNN,
      kernel_support.CUDNN_ONE_DOCUMENT,
      kernel_support.FUSED_BY_CUDNN,
    ),
    "never calls cuDNN",
    "layers.attention.cudnn_attention.one_document (or .cudnn, for packed"
    " rows)",
  ),
  settings.SPLASH: _Part(
    (kernel_support.SPLASH,),
    "is not splash attention",
    kernel_support.SPLASH.name,
  ),
  settings.RING: _Part(
    (kernel_support.RING,), "is not ring attention", kernel_support.RING.name
  ),
}
_PLATFORMS = {"gpu": "cuda"}


def check(
  job: job_lib.Job,
  found: Sequence[result.KernelChoice],
  *,
  platform: hardware.Platform,
  quantized: Sequence[result.QuantizedProduct] = (),
) -> None:
  """Checks what kernels a step was compiled to.

  Args:
    job: The resolved configuration, built.
    found: What `kernel_contract.choices` returned.
    platform: Whose compiler made the step.
    quantized: What the covered products run as, for the reason.

  Raises:
    UserError: It is decided that the step has other kernels; the message says
      which, and why.
  """
  wrong = list(
    kernel_contract.mismatches(job.expected_kernels, found, platform=platform)
  )
  if not wrong:
    return
  problems = [
    f"{expected.part} is expected to be {expected.kernel}, but the compiled"
    f" step has {words}"
    for expected, words in wrong
  ]
  reasons = dict.fromkeys(
    _quantized_reason(quantized)
    if expected.part == settings.QUANTIZED
    else _reason(job, expected)
    for expected, _ in wrong
  )
  text = ": ".join(filter(None, ("; ".join(problems), *reasons)))
  raise user_error.UserError(
    user_error.sentence(f"Job.expected_kernels: {text}")
  )


def check_compiled(
  session: session_lib.Session,
  compiled: jax.stages.Compiled,
  traced: jax.stages.Traced,
) -> None:
  """Checks a step that was compiled where it runs.

  Args:
    session: The job on its devices.
    compiled: Its training step.
    traced: The same, traced.

  Raises:
    UserError: As for `check`.
  """
  if not session.job.expected_kernels:
    return
  program = hlo.parse(compiled.as_text() or "")
  found = kernel_contract.choices(program, is_tuned=True)
  kind = hardware.for_device_kind(
    session.layout.mesh.devices.flat[0].device_kind
  )
  quantized: Sequence[result.QuantizedProduct] = ()
  if kind is not None and any(
    choice.part == settings.QUANTIZED for choice in found
  ):
    quantized = quantized_products.of(
      flops.count(traced.jaxpr),
      program,
      kind=kind,
      num_devices=session.layout.mesh.size,
    )
  check(session.job, found, platform=platform_of(session), quantized=quantized)


def check_devices(
  job: job_lib.Job, *, platform: hardware.Platform, where: str
) -> None:
  """Checks that the model asks for no kernel that its devices cannot have.

  Args:
    job: The resolved configuration, built.
    platform: Of the devices.
    where: What the devices are called.

  Raises:
    UserError: It does; the message says which kernels it can have.
  """
  attention_kernels.check(job, platform=platform.value, where=where)


def platform_of(session: session_lib.Session) -> hardware.Platform:
  """Returns the platform of a session's devices."""
  name = session.layout.mesh.devices.flat[0].platform
  return hardware.Platform(_PLATFORMS.get(name, name))


def _reason(job: job_lib.Job, expected: settings.ExpectedKernel) -> str:
  """Why attention has another kernel: what the model's layers ask for."""
  part = _PARTS.get(expected.kernel)
  if part is None:
    return ""
  for path, layer in attention_kernels.layers(job.task.model, "task.model"):
    if not _is_one_of(layer.kernel, part):
      return (
        f"{path}.kernel is {_name(layer.kernel)}, which {part.other};"
        f" set it to {part.advice}{_obstacle(layer, part)}"
      )
  return ""


def _quantized_reason(quantized: Sequence[result.QuantizedProduct]) -> str:
  """Why a covered product is not multiplied in few bits."""
  for each in quantized:
    if each.reason:
      return f"{each.part} ({each.product}): {each.reason}"
  return ""


def _obstacle(layer: Any, part: _Part) -> str:
  request = kernel_support.of_layer(layer)
  problems = list(part.supports[0].problems(request))
  return f", after a change of the layer: {problems[0]}" if problems else ""


def _is_one_of(kernel: Any, part: _Part) -> bool:
  support = kernel_support.of(kernel)
  # One that XLA stands in for has the name, and runs everywhere.
  return support is not None and any(
    (support.name, support.platforms) == (s.name, s.platforms)
    for s in part.supports
  )


def _name(kernel: Any) -> str:
  support = kernel_support.of(kernel)
  if support is not None:
    return support.name
  kernel = kernel.func if isinstance(kernel, functools.partial) else kernel
  module = getattr(kernel, "__module__", "").removeprefix("paxon.")
  return f"{module}.{getattr(kernel, '__qualname__', repr(kernel))}"
