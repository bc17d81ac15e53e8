"""Attention layers of a job, and whether their kernels can serve them.

Asked of the configuration alone, before anything is traced: the fields of each
layer, the platform, and whether the mesh splits rows.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

from paxon.layers.attention import kernel_support
from paxon.runner import job as job_lib
from paxon.runner import user_error

_Feature = kernel_support.Feature


def check(
  job: job_lib.Job,
  *,
  platform: str | None = None,
  where: str = "",
  length_shards: int = 1,
) -> None:
  """Checks that each attention kernel can serve its layer.

  Args:
    job: The resolved configuration, built.
    platform: Of the devices: "cuda", "tpu" or "cpu"; None if it is not known.
    where: What the devices are called, for the message.
    length_shards: Into how many parts the mesh splits a row.

  Raises:
    UserError: One cannot; the message has the place of the kernel in the
      configuration, each reason, and the kernels that can.
  """
  for path, layer in layers(job.task.model, "task.model"):
    support = kernel_support.of(layer.kernel)
    if support is None:
      continue
    request = dataclasses.replace(
      kernel_support.of_layer(layer), platform=platform
    )
    if length_shards > 1:
      words = f"mesh {job.mesh!r} splits rows into {length_shards} parts"
      request = request.asking(_Feature.SPLIT_ROWS, words)
    if job.generation is not None and getattr(layer, "causal", False):
      request = request.asking(_Feature.CACHE, "the job generates samples")
    message = kernel_support.refusal(support, request)
    if message is not None:
      place = f"{path}.kernel on {where}" if where else f"{path}.kernel"
      raise user_error.UserError(f"{place}: {message}")


def layers(node: Any, path: str) -> Iterator[tuple[str, Any]]:
  """Yields the layers of a model that have an attention kernel, by their paths.

  Args:
    node: The model, a part of it, or a list of parts.
    path: Its own path.
  """
  if isinstance(node, list | tuple):
    for i, item in enumerate(node):
      yield from layers(item, f"{path}[{i}]")
  elif dataclasses.is_dataclass(node) and not isinstance(node, type):
    names = [field.name for field in dataclasses.fields(node)]
    # A kernel around another kernel is no layer.
    if {"kernel", "num_heads"} <= set(names):
      yield path, node
    for name in names:
      # A module's parent would lead back up.
      if name not in ("parent", "name"):
        yield from layers(getattr(node, name, None), f"{path}.{name}")
