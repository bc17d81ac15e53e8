"""Options of the compiler: one table for the run and for its plan.

They are given to each compilation, never to the process by XLA_FLAGS, so that
what a plan was compiled with is what the run is compiled with. `Job`'s own
options come on top; those of another platform are left out, so that one
experiment can name options for GPUs and for TPUs and still run on a CPU.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import re
from typing import Final

import jax
import numpy as np

from paxon.runner import user_error
from paxon.runner.plan import hardware
from paxon.runner.settings import compiler
from paxon.sharding import suggestions

Value = compiler.Value
Options = Mapping[str, Value]

_Platform = hardware.Platform


# Collectives overlap with products instead of waiting for them (docs.jax.dev,
# GPU performance tips; docs.nvidia.com/jax-toolbox, environment variables). On
# one device only copies are left to hide: jaxlib 0.10's does nothing then, and
# 0.11's, on by default, held 41 % more memory for a small model; see
# docs/design/0015.
OVERLAP: Final = "xla_gpu_enable_latency_hiding_scheduler"

# Differences of a plan for GPUs: it has no GPU on which to try kernels.
_AUTOTUNING: Final = "xla_gpu_autotune_level"

_PREFIXES: Final = {
  "xla_cpu_": _Platform.CPU,
  "xla_gpu_": _Platform.CUDA,
  "xla_jf_": _Platform.TPU,
  "xla_tpu_": _Platform.TPU,
}
# TPU options whose names do not say so.
_TPU_ONLY: Final = frozenset({"xla_enable_async_all_gather"})
_PLATFORMS: Final = {
  "cpu": _Platform.CPU,
  "cuda": _Platform.CUDA,
  "gpu": _Platform.CUDA,
  "tpu": _Platform.TPU,
}
_UNKNOWN: Final = re.compile(r"No such compile option: '([^']*)'")
_BAD_VALUE: Final = re.compile(r"While setting option (\w+), (.*)")


def resolve_options(
  given: Options,
  device: jax.Device,
  *,
  num_devices: int,
  sets: Sequence[str] = (),
) -> dict[str, bool | str]:
  """Returns the options with which programs for a device are compiled.

  Args:
    given: Given of the job, which win.
    device: One of the devices, which may be absent.
    num_devices: How many there are.
    sets: The sets that the job names, see `settings.compiler`.
  """
  kind = hardware.find_by_device_kind(device.device_kind)
  platform = _PLATFORMS.get(device.platform)
  name = None if kind is None else kind.name
  return _options(given, platform, name, num_devices, sets)


def resolve_for_hardware(
  given: Options,
  kind: hardware.Hardware,
  *,
  num_devices: int,
  sets: Sequence[str] = (),
) -> dict[str, bool | str]:
  """Returns the options of `resolve_options` for a kind without a device."""
  return _options(given, kind.platform, kind.name, num_devices, sets)


def _options(
  given: Options,
  platform: hardware.Platform | None,
  kind: str | None,
  num_devices: int,
  sets: Sequence[str],
) -> dict[str, bool | str]:
  options: dict[str, Value] = {}
  if platform is _Platform.CUDA:
    options[OVERLAP] = num_devices > 1
  for each in sets:
    options |= compiler.get_options(each, kind)
  for name, value in given.items():
    if _find_platform(name) in (platform, None):
      options[name] = value
  return _as_jax_takes_them(options)


def check(
  given: Options, device: jax.Device, *, sets: Sequence[str] = ()
) -> None:
  """Has the compiler of a device check a job's options, on a tiny program.

  Args:
    given: Given of the job.
    device: One of the devices, which may be absent.
    sets: The sets that the job names.

  Raises:
    UserError: The compiler does not know one of them, or refuses its value.
  """
  options = resolve_options(given, device, num_devices=1, sets=sets)
  if set(options) <= {OVERLAP} - set(given):
    return
  sharding = jax.sharding.SingleDeviceSharding(device)
  tiny = jax.ShapeDtypeStruct((), np.float32, sharding=sharding)
  with refusals(device):
    # Not an identity, which is never compiled.
    jax.jit(lambda x: x + x).lower(tiny).compile(compiler_options=options)


@contextlib.contextmanager
def refusals(device: jax.Device) -> Iterator[None]:
  """Explains what a compiler says of options inside the `with` statement.

  Args:
    device: Device for which programs are compiled.

  Raises:
    UserError: The compiler does not know an option, or refuses its value.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    unknown = _UNKNOWN.search(str(error))
    refused = _BAD_VALUE.search(str(error))
    if unknown is not None:
      known = {OVERLAP}.union(*(each.options for each in compiler.SETS))
      # The compiler has hundreds more, and no list of them.
      close = suggestions.find_closest(unknown[1], known)
      hint = f"; did you mean {close[0]!r}?" if close else "."
      raise user_error.UserError(
        f"Job.compiler_options: the compiler for {device.device_kind} has no"
        f" option {unknown[1]!r}{hint}"
      ) from error
    if refused is not None:
      raise user_error.UserError(
        f"Job.compiler_options[{refused[1]!r}]: {refused[2]}"
      ) from error
    raise


def differences(platform: hardware.Platform) -> tuple[str, ...]:
  """Returns how a plan's compilation differs from the run's, in sentences."""
  if platform is not _Platform.CUDA:
    return ()
  return (
    f"Compiled with {_AUTOTUNING}=0, because there is no GPU to try kernels on:"
    " which kernels multiply matrices is decided when the run starts.",
  )


def to_text(options: Options) -> dict[str, str]:
  """Returns options as a plan holds them."""
  return {name: str(value) for name, value in sorted(options.items())}


def plan_options(platform: hardware.Platform) -> dict[str, bool | str]:
  """Returns the options by which a plan's compilation differs."""
  return {_AUTOTUNING: "0"} if platform is _Platform.CUDA else {}


def _as_jax_takes_them(options: Options) -> dict[str, bool | str]:
  """Numbers as text; XLA reads them by the option's type."""
  return {
    name: value if isinstance(value, bool | str) else str(value)
    for name, value in options.items()
  }


def _find_platform(name: str) -> hardware.Platform | None:
  """Returns the platform of an option; None if all compilers have it."""
  if name in _TPU_ONLY:
    return _Platform.TPU
  found = (p for prefix, p in _PREFIXES.items() if name.startswith(prefix))
  return next(found, None)
