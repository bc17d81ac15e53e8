"""Checks of a job's kernels, before tracing and on the compiled step.

`check_attention` reads the configuration alone: the fields of each attention
layer, the platform, and whether the mesh splits sequences. `check_compiled`
compares the kernels of a compiled step with `Job.expected_kernels`.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax

from paxon.layers.attention import kernel_support
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.plan import hardware
from paxon.runner.settings import expected_kernels as settings

if TYPE_CHECKING:
  from paxon.runner.plan import result


class _Implementations(NamedTuple):
  """The attention kernels of ours that compile to one expected kernel.

  Attributes:
    supports: The kernels.
    other: Why another kernel does not match, for the message.
    advice: Remedy, for the message.
  """

  supports: tuple[kernel_support.Support, ...]
  other: str
  advice: str


_EXPECTED: Final = {
  settings.CUDNN: _Implementations(
    (
      kernel_support.CUDNN,
      kernel_support.CUDNN_ONE_DOCUMENT,
      kernel_support.FUSED_BY_CUDNN,
    ),
    "never calls cuDNN",
    "layers.attention.cudnn_attention.one_document (or .cudnn, for packed"
    " sequences)",
  ),
  settings.SPLASH: _Implementations(
    (kernel_support.SPLASH,),
    "is not splash attention",
    kernel_support.SPLASH.name,
  ),
  settings.RING: _Implementations(
    (kernel_support.RING,), "is not ring attention", kernel_support.RING.name
  ),
}
_PLATFORMS = {"gpu": "cuda"}
_Feature = kernel_support.Feature


def check_attention(
  job: job_lib.Job,
  *,
  platform: str | None = None,
  where: str = "",
  length_shards: int = 1,
) -> None:
  """Checks that each attention kernel supports its layer.

  Args:
    job: The resolved configuration, built.
    platform: Of the devices: "cuda", "tpu" or "cpu"; None if unknown.
    where: Name of the devices, for the message.
    length_shards: Number of shards into which the mesh splits a sequence.

  Raises:
    UserError: A kernel does not; the message has its configuration path, each
      reason, and the kernels that do.
  """
  for path, layer in _attention_layers(job.task.model, "task.model"):
    support = kernel_support.find_support(layer.kernel)
    if support is None:
      continue
    request = dataclasses.replace(
      kernel_support.from_layer(layer), platform=platform
    )
    if length_shards > 1:
      words = f"mesh {job.mesh!r} splits sequences into {length_shards} shards"
      request = request.asking(_Feature.SPLIT_SEQUENCES, words)
    is_causal = isinstance(layer, kernel_support.HasMask) and layer.mask.causal
    if job.generation is not None and is_causal:
      request = request.asking(_Feature.CACHE, "the job generates samples")
    message = kernel_support.explain(support, request)
    if message is not None:
      place = f"{path}.kernel on {where}" if where else f"{path}.kernel"
      raise user_error.UserError(f"{place}: {message}")


def get_platform(mesh: jax.sharding.Mesh) -> hardware.Platform:
  """Returns the platform of the mesh's devices."""
  name = mesh.devices.flat[0].platform
  return hardware.Platform(_PLATFORMS.get(name, name))


def check_compiled(
  job: job_lib.Job,
  compiled: jax.stages.Compiled,
  traced: jax.stages.Traced,
  *,
  mesh: jax.sharding.Mesh,
) -> None:
  """Checks a compiled step for the devices it runs on (`check_expected`)."""
  if not job.expected_kernels:
    return
  # The parser of compiled programs is imported only for such jobs.
  from paxon.runner.plan import flops, kernel_contract, quantized_matmuls
  from paxon.runner.plan.program_text import hlo

  program = hlo.parse(compiled.as_text() or "")
  found = kernel_contract.choices(program, is_tuned=True)
  kind = hardware.find_by_device_kind(mesh.devices.flat[0].device_kind)
  quantized: Sequence[result.QuantizedMatmul] = ()
  if kind is not None and any(
    choice.part == settings.QUANTIZED for choice in found
  ):
    quantized = quantized_matmuls.find_quantized_matmuls(
      flops.count(traced.jaxpr), program, kind=kind, num_devices=mesh.size
    )
  check_expected(job, found, platform=get_platform(mesh), quantized=quantized)


def check_expected(
  job: job_lib.Job,
  found: Sequence["result.KernelChoice"],
  *,
  platform: hardware.Platform,
  quantized: Sequence["result.QuantizedMatmul"] = (),
) -> None:
  """Compares the kernels of a compiled step with the expected ones of the job.

  Raises:
    UserError: The step certainly has other kernels; the message says which,
      and why.
  """
  from paxon.runner.plan import kernel_contract

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
    else _attention_reason(job, expected)
    for expected, _ in wrong
  )
  text = ": ".join(filter(None, ("; ".join(problems), *reasons)))
  raise user_error.UserError(
    user_error.sentence(f"Job.expected_kernels: {text}")
  )


def _attention_reason(
  job: job_lib.Job, expected: settings.ExpectedKernel
) -> str:
  """Returns why attention compiled to another kernel, or an empty text."""
  part = _EXPECTED.get(expected.kernel)
  if part is None:
    return ""
  for path, layer in _attention_layers(job.task.model, "task.model"):
    if not _is_one_of(layer.kernel, part):
      return (
        f"{path}.kernel is {_name(layer.kernel)}, which {part.other};"
        f" set it to {part.advice}{_obstacle(layer, part)}"
      )
  return ""


def _quantized_reason(quantized: Sequence["result.QuantizedMatmul"]) -> str:
  """Returns why a matmul is not quantized, or an empty text."""
  for each in quantized:
    if each.reason:
      return f"{each.module} ({each.role}): {each.reason}"
  return ""


def _attention_layers(node: Any, path: str) -> Iterator[tuple[str, Any]]:
  """Yields the path and the layer of each attention kernel of a model."""
  if isinstance(node, list | tuple):
    for i, item in enumerate(node):
      yield from _attention_layers(item, f"{path}[{i}]")
  elif dataclasses.is_dataclass(node) and not isinstance(node, type):
    names = [field.name for field in dataclasses.fields(node)]
    # A kernel around another kernel is no layer.
    if {"kernel", "num_heads"} <= set(names):
      yield path, node
    for name in names:
      # A module's parent would lead back up.
      if name not in ("parent", "name"):
        yield from _attention_layers(
          getattr(node, name, None), f"{path}.{name}"
        )


def _obstacle(layer: Any, part: _Implementations) -> str:
  request = kernel_support.from_layer(layer)
  problems = list(part.supports[0].problems(request))
  return f", after a change of the layer: {problems[0]}" if problems else ""


def _is_one_of(kernel: Any, part: _Implementations) -> bool:
  support = kernel_support.find_support(kernel)
  # XLA's fallback has the same name, but every platform.
  return support is not None and any(
    (support.name, support.platforms) == (s.name, s.platforms)
    for s in part.supports
  )


def _name(kernel: Any) -> str:
  support = kernel_support.find_support(kernel)
  if support is not None:
    return support.name
  kernel = kernel.func if isinstance(kernel, functools.partial) else kernel
  module = getattr(kernel, "__module__", "").removeprefix("paxon.")
  return f"{module}.{getattr(kernel, '__qualname__', repr(kernel))}"
