"""The kernels that a job expects, held against a compiled step."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax

from paxon.layers.attention import cudnn_attention
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.plan import hardware, kernel_contract, result
from paxon.runner.plan.program_text import hlo
from paxon.runner.programs import session as session_lib

_ADVICE = (
  "layers.attention.cudnn_attention.one_document (or .cudnn, for packed rows)"
)
_PLATFORMS = {"gpu": "cuda"}


def check(
  job: job_lib.Job,
  found: Sequence[result.KernelChoice],
  *,
  platform: hardware.Platform,
) -> None:
  """Checks what kernels a step was compiled to.

  Args:
    job: The resolved configuration, built.
    found: What `kernel_contract.choices` returned.
    platform: Whose compiler made the step.

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
  reasons = dict.fromkeys(_reason(job, expected) for expected, _ in wrong)
  text = ": ".join(filter(None, ("; ".join(problems), *reasons)))
  raise user_error.UserError(
    user_error.sentence(f"Job.expected_kernels: {text}")
  )


def check_compiled(
  session: session_lib.Session, compiled: jax.stages.Compiled
) -> None:
  """Checks a step that was compiled where it runs.

  Args:
    session: The job on its devices.
    compiled: Its training step.

  Raises:
    UserError: As for `check`.
  """
  if not session.job.expected_kernels:
    return
  program = hlo.parse(compiled.as_text() or "")
  found = kernel_contract.choices(program, is_tuned=True)
  check(session.job, found, platform=platform_of(session))


def check_devices(
  job: job_lib.Job, *, platform: hardware.Platform, where: str
) -> None:
  """Checks that the model asks for no kernel that its devices cannot have.

  Args:
    job: The resolved configuration, built.
    platform: Of the devices.
    where: What the devices are called.

  Raises:
    UserError: It asks for cuDNN elsewhere than on NVIDIA GPUs.
  """
  if platform is hardware.Platform.CUDA:
    return
  for path, layer in _attention_layers(job.task.model, "task.model"):
    if _is_cudnn(layer.kernel):
      raise user_error.UserError(
        f"{path}.kernel is cuDNN's attention, which runs on NVIDIA GPUs, and"
        f" not on {where}; use layers.attention.kernels.fused there."
      )


def platform_of(session: session_lib.Session) -> hardware.Platform:
  """Returns the platform of a session's devices."""
  name = session.layout.mesh.devices.flat[0].platform
  return hardware.Platform(_PLATFORMS.get(name, name))


def _reason(job: job_lib.Job, expected: kernel_contract.ExpectedKernel) -> str:
  """Why attention has another kernel: what the model's layers ask for."""
  if expected.kernel != kernel_contract.CUDNN:
    return ""
  words = dict.fromkeys(
    f"{path}.kernel is {_name(layer.kernel)}, which never calls cuDNN;"
    f" set it to {_ADVICE}{_obstacle(layer)}"
    for path, layer in _attention_layers(job.task.model, "task.model")
    if not _is_cudnn(layer.kernel)
  )
  return next(iter(words), "")


def _obstacle(layer: Any) -> str:
  dtype = getattr(layer, "dtype", None)
  if dtype is None:
    return ""
  problem = cudnn_attention.problem(head_dim=layer.head_dim, dtype=dtype)
  return f", after a change of the layer: {problem}" if problem else ""


def _is_cudnn(kernel: Any) -> bool:
  if isinstance(kernel, functools.partial):
    settings, kernel = kernel.keywords, kernel.func
    if settings.get("implementation") == "cudnn":
      return True
    if "implementation" in settings:
      return False
  return kernel in (cudnn_attention.cudnn, cudnn_attention.one_document)


def _name(kernel: Any) -> str:
  kernel = kernel.func if isinstance(kernel, functools.partial) else kernel
  module = getattr(kernel, "__module__", "").removeprefix("paxon.")
  return f"{module}.{getattr(kernel, '__qualname__', repr(kernel))}"


def _attention_layers(node: Any, path: str) -> Iterator[tuple[str, Any]]:
  """Yields the attention layers of a model, by their paths."""
  if isinstance(node, list | tuple):
    for i, item in enumerate(node):
      yield from _attention_layers(item, f"{path}[{i}]")
  elif dataclasses.is_dataclass(node) and not isinstance(node, type):
    names = [field.name for field in dataclasses.fields(node)]
    if {"kernel", "head_dim"} <= set(names):
      yield path, node
    for name in names:
      # A module's parent would lead back up.
      if name not in ("parent", "name"):
        yield from _attention_layers(
          getattr(node, name, None), f"{path}.{name}"
        )
