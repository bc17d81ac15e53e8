"""The platform that a function is traced for.

XLA's backends are fast with different forms of the same computation. Layers
choose the form while they are traced, so that only one is compiled and the
programs for other platforms do not change.
"""

from collections.abc import Iterator
import contextlib
import contextvars

import jax

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
  if _is_any.get():
    return False
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None:
    return jax.default_backend() == "cpu"
  return device.platform == "cpu"


def num_devices() -> int:
  """Returns the size of the mesh, 1 outside of one."""
  return max(jax.sharding.get_abstract_mesh().size, 1)
