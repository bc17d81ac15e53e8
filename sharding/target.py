"""The platform that a function is traced for.

XLA's backends are fast with different forms of the same computation. Layers
choose the form while they are traced, so that only one is compiled and the
programs for other platforms do not change. A kernel declares the dtypes and
platforms that it supports.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp

CPU: Final = "cpu"
CUDA: Final = "cuda"
TPU: Final = "tpu"

# Set where only shapes matter, so that no backend is started.
_is_any: contextvars.ContextVar[bool] = contextvars.ContextVar(
  "target_is_any", default=False
)


@contextlib.contextmanager
def any_platform() -> Iterator[None]:
  """Traces for no platform: for shapes, before JAX may start a backend."""
  token = _is_any.set(True)
  try:
    yield
  finally:
    _is_any.reset(token)


def is_cpu() -> bool:
  """Returns whether the function being traced is for CPUs.

  That is the platform of the mesh, such as that of a plan for other devices,
  or that of the process outside of one.
  """
  return _platform() == "cpu"


def is_gpu() -> bool:
  """Returns whether the function being traced is for GPUs, as `is_cpu`."""
  return _platform() in ("gpu", "cuda", "rocm")


def _platform() -> str | None:
  """Returns JAX's name of the platform; None if it may be any."""
  if _is_any.get():
    return None
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def num_devices() -> int:
  """Returns the size of the mesh, 1 outside of one."""
  return max(jax.sharding.get_abstract_mesh().size, 1)


def is_one_cpu() -> bool:
  """Returns whether the function being traced is for a single CPU device."""
  return is_cpu() and num_devices() == 1


def fast_matmul_dtype() -> jnp.dtype:
  """Returns the dtype of low-precision matmuls: bfloat16.

  float32 on CPUs, which multiply bfloat16 slowly.
  """
  return jnp.dtype(jnp.float32 if is_cpu() else jnp.bfloat16)


def map_matrices(f: Callable[..., Any], *matrices: jax.Array) -> Any:
  """Returns `f(*matrices)` for a decomposition or solution `f` of JAX.

  On CPUs one matrix after another. Otherwise jaxlib divides the matrices
  between the threads of XLA's pool, and waits for them in one of these threads:
  as many calls at the same time as there are threads wait forever.

  Args:
    f: Takes matrices with the same leading dimensions, any number of them, and
      returns arrays with these dimensions.
    *matrices: Arrays [..., rows, columns].
  """
  batch = matrices[0].shape[:-2]
  if not batch or not is_cpu():
    return f(*matrices)
  flat = tuple(x.reshape(-1, *x.shape[-2:]) for x in matrices)
  found = jax.lax.map(lambda xs: f(*xs), flat)
  return jax.tree.map(lambda y: y.reshape(*batch, *y.shape[1:]), found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Requirements of a call or a layer; unknown ones are None.

  Attributes:
    dtype: Name of the dtype of the operands.
    platform: "cuda", "tpu" or "cpu".
  """

  dtype: str | None = None
  platform: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
  """The dtypes and platforms that a kernel supports.

  Attributes:
    name: Its import path in a configuration.
    dtypes: Names of supported dtypes; empty for all.
    platforms: Supported platforms; empty for all.
  """

  name: str
  dtypes: tuple[str, ...] = ()
  platforms: tuple[str, ...] = ()

  def problems(self, request: Any) -> Iterator[str]:
    """Yields each reason why a `Request` is not supported."""
    if self.platforms and request.platform not in (None, *self.platforms):
      platforms = join_words(self.platforms)
      yield f"it runs on {platforms}, not on {request.platform}"
    if self.dtypes and request.dtype not in (None, *self.dtypes):
      yield (
        f"its dtype is {request.dtype}, and the kernel takes"
        f" {join_words(self.dtypes)}"
      )


def join_words(words: Sequence[str]) -> str:
  """Returns "a, b or c"."""
  *most, last = words
  return f"{', '.join(most)} or {last}" if most else last
