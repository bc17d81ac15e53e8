"""The command line that checks a machine's devices, and plans against runs.

  tools/gpu_check
      prints versions, devices, measured rates, and whether fp8 matmuls and
      cuDNN attention work
  tools/gpu_check --plan [--page=FILE]
      also plans four experiments for these devices, runs a few steps of each,
      and writes planned and measured memory and time into
      docs/plan_accuracy.md
  tools/gpu_check --plan --dry_run
      the same with tiny models, on any device; writes only with --page

Memory is what `Device.memory_stats` reports. Without it, as on CPUs, it is what
the compiler reports for the program that runs; time then has no verdict.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import datetime
import importlib.metadata
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
from typing import Any, Final

import jax
import jax.numpy as jnp

from paxon.runner import user_error
from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import hardware
from paxon.runner.plan import target as targets
from paxon.runner.plan.estimate import efficiency
from paxon.runner.planning import child
from paxon.runner.training import compiled_steps
from paxon.runner.training import session as session_lib

PAGE: Final = pathlib.Path(__file__).parents[2] / "docs/plan_accuracy.md"
BEGIN: Final = "<!-- gpu_check begins -->"
END: Final = "<!-- gpu_check ends -->"
_TIME_LIMIT: Final = 1800.0
_WARMUP, _STEPS = 2, 8
_LLAMA: Final = "tasks.lm.params.llama.Llama2_7B"
_CUDNN: Final = (
  "attention_kernel",
  "layers.attention.cudnn_attention.one_document",
)
_SHORT: Final = (("num_layers", "4"), ("mesh", "fsdp=-1"))
_TINY: Final = (
  ("mesh", "fsdp=-1"),
  ("num_layers", "2"),
  ("embed_dim", "64"),
  ("mlp_dim", "128"),
  ("num_heads", "4"),
  ("num_kv_heads", "4"),
  ("head_dim", "16"),
  ("vocab_size", "512"),
  ("length", "64"),
  ("attention_kernel", "layers.attention.kernels.plain"),
)
_NO_REMAT: Final = ("remat_policy", "None")


@dataclasses.dataclass(frozen=True)
class Case:
  """An experiment to plan and to run.

  Attributes:
    name: Short name.
    experiment: Value of `--exp`.
    knobs: Assignments of `--fdl.`.
  """

  name: str
  experiment: str
  knobs: tuple[tuple[str, str], ...]


CASES: Final = (
  Case("GPT-2 124M", "tasks.lm.params.gpt2.Gpt2Small124M", (_CUDNN,)),
  Case("Llama 2 7B, 4 layers", _LLAMA, _SHORT),
  Case("Llama 2 7B, 4 layers, one document", _LLAMA, (*_SHORT, _CUDNN)),
  Case("Llama 2 7B, 4 layers, no remat", _LLAMA, (*_SHORT, _NO_REMAT)),
)
TINY_CASES: Final = (
  Case("tiny", _LLAMA, _TINY),
  Case("tiny, no remat", _LLAMA, (*_TINY, _NO_REMAT)),
  Case("tiny, microbatches", _LLAMA, (*_TINY, ("num_microbatches", "2"))),
  Case("tiny, wider", _LLAMA, (*_TINY, ("mlp_dim", "512"))),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """A plan and a run; memory in bytes of a device, time in seconds.

  Attributes:
    name: Name of the case.
    planned_peak: Peak memory of the plan.
    measured_peak: Peak memory of the run.
    planned_step: Estimated step time; None without rates.
    measured_step: Median step time.
    bound: Lower bound of the step time; None without rates.
  """

  name: str
  planned_peak: int
  measured_peak: int
  planned_step: float | None
  measured_step: float
  bound: float | None


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit status."""
  if {"-h", "--help"} & set(arguments):
    print(__doc__)
    return 0
  try:
    page = _parse_page(arguments)
    is_dry = "--dry_run" in arguments
    found = []
    if "--plan" in arguments:
      # Before this process takes memory of the devices.
      found = _compare_all(TINY_CASES if is_dry else CASES)
    check(size=256 if is_dry else 8192)
    if "--plan" in arguments:
      table = to_markdown(found)
      print(table)
      if page is None and not is_dry:
        page = PAGE
      if page is not None:
        write(page, table)
        print(f"wrote {page}")
  except user_error.UserError as error:
    print(f"gpu_check: {error}", file=sys.stderr)
    return 1
  return 0


def _parse_page(arguments: Sequence[str]) -> pathlib.Path | None:
  page = None
  for argument in arguments:
    if argument.startswith("--page="):
      page = pathlib.Path(argument.removeprefix("--page="))
    elif argument not in ("--plan", "--dry_run"):
      raise user_error.UserError(
        f"Unknown argument {argument!r}; choose from --plan, --dry_run and"
        " --page=FILE (see --help)."
      )
  return page


def check(*, size: int) -> dict[str, float]:
  """Prints versions, devices and measured rates.

  Args:
    size: Rows and columns of the matrices.

  Returns:
    Efficiency factors by name; none without datasheet rates.
  """
  for name in ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu"):
    try:
      print(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      continue
  devices = jax.devices()
  kind = hardware.for_device_kind(devices[0].device_kind)
  known = "not in the table of hardware" if kind is None else kind.name
  print(f"{len(devices)} x {devices[0].device_kind} ({known})")
  factors: dict[str, float] = {}
  rates = _measure(size)
  for name, (rate, unit) in rates.items():
    sheet = _datasheet(kind, name)
    share = f", {rate / sheet:.2f} of the data sheet" if sheet else ""
    print(f"{name}: {rate / 1e12:.3g} {unit}{share}")
    if sheet:
      factors[name] = rate / sheet
  for name, works in {
    "cuDNN attention": lambda: _attend("cudnn"),
    "fp8 matmul": lambda: _multiply_fp8(size),
  }.items():
    print(f"{name}: {_try(works)}")
  if factors:
    text = ",".join(f"{name}={x:.2f}" for name, x in factors.items())
    print(f"to plan with these factors: {efficiency.VARIABLE}={text}")
  return factors


def _measure(size: int) -> dict[str, tuple[float, str]]:
  """Rates of this machine in FLOP/s or bytes/s, with TFLOP/s or TB/s."""
  x = jnp.ones((size, size), jnp.bfloat16)
  flops = 2.0 * size**3
  found = {"matmul": (flops / _seconds(lambda: x @ x), "TFLOP/s")}
  y = jnp.ones((64 * size, size // 2), jnp.bfloat16)
  copy = jax.jit(lambda y: y + 1)
  found["memory"] = (2.0 * y.nbytes / _seconds(lambda: copy(y)), "TB/s")
  number = jax.device_count()
  if number > 1:
    mesh = jax.make_mesh((number,), ("all",))
    split = jax.NamedSharding(mesh, jax.P("all"))
    whole = jax.NamedSharding(mesh, jax.P())
    z = jax.device_put(jnp.ones((16 * size, size), jnp.bfloat16), split)
    gather = jax.jit(lambda z: z, out_shardings=whole)
    sent = z.nbytes * (number - 1) / number
    found["fast_link"] = (sent / _seconds(lambda: gather(z)), "TB/s")
  low = x.astype(jnp.float8_e4m3fn)
  try:
    seconds = _seconds(lambda: _low_precision(low, low))
  except Exception:  # Not supported by this device.
    return found
  return found | {"matmul.float8": (flops / seconds, "TFLOP/s")}


def _datasheet(kind: hardware.Hardware | None, name: str) -> float | None:
  if kind is None:
    return None
  return {
    "matmul": kind.peak_flops(),
    "matmul.float8": kind.peak_flops("float8_e4m3fn"),
    "memory": kind.memory_bandwidth,
    # Between hosts a gather takes the network.
    "fast_link": kind.link_bandwidth if jax.process_count() == 1 else None,
  }[name]


@jax.jit
def _low_precision(x: jax.Array, y: jax.Array) -> jax.Array:
  return jax.lax.dot(x, y, preferred_element_type=jnp.bfloat16)


def _multiply_fp8(size: int) -> jax.Array:
  x = jnp.ones((size, size), jnp.float8_e4m3fn)
  return _low_precision(x, x)


def _attend(implementation: Any) -> jax.Array:
  x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
  return jax.nn.dot_product_attention(
    x, x, x, is_causal=True, implementation=implementation
  )


def _try(function: Callable[[], jax.Array]) -> str:
  try:
    jax.block_until_ready(function())
  except Exception as error:
    return f"not available ({str(error).splitlines()[0][:100]})"
  return "works"


def _seconds(function: Callable[[], Any]) -> float:
  """Median time of a call."""
  return statistics.median(_times(function))


def _times(function: Callable[[], Any]) -> list[float]:
  times = []
  for number in range(_WARMUP + _STEPS):
    begin = time.perf_counter()
    jax.block_until_ready(function())
    if number >= _WARMUP:
      times.append(time.perf_counter() - begin)
  return times


def _compare_all(cases: Sequence[Case]) -> list[Comparison]:
  """Compares each case in a process of its own.

  Devices report the peak since a process started.
  """
  with futures.ProcessPoolExecutor(
    1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
  ) as pool:
    found = []
    for case in cases:
      print(f"planning and running {case.name}", flush=True)
      found.append(pool.submit(compare, case).result())
    return found


def compare(case: Case) -> Comparison:
  """Plans a case for the devices of this machine, and runs it."""
  target = _target()
  given = [overrides.Override(*knob) for knob in case.knobs]
  plan = child.plan(
    case.experiment, given, target, is_compiled=True, time_limit=_TIME_LIMIT
  )
  if plan.memory.peak is None:
    reasons = " ".join(plan.notes)
    raise user_error.UserError(f"{case.name} was not compiled: {reasons}")
  peak, step = _run(case, given)
  return Comparison(
    name=case.name,
    planned_peak=plan.memory.peak,
    measured_peak=peak,
    planned_step=None if plan.estimate is None else plan.estimate.step,
    measured_step=step,
    bound=None if plan.bound is None else plan.bound.step,
  )


def _target() -> targets.Target:
  """The target that these devices are."""
  device, number = jax.devices()[0], jax.device_count()
  kind = hardware.for_device_kind(device.device_kind)
  if kind is None or kind.platform is hardware.Platform.TPU:
    raise user_error.UserError(
      f"Plans are compared on GPUs and CPUs, not on {device.device_kind}."
    )
  if kind.platform is hardware.Platform.CPU:
    return targets.parse(f"cpu:{number}")
  per_host = jax.local_device_count()
  return targets.parse(f"{kind.name}:{number // per_host}x{per_host}")


def _run(case: Case, given: Sequence[overrides.Override]) -> tuple[int, float]:
  """Returns the peak memory of a device and the median step time."""
  resolved = resolving.resolve(case.experiment, list(given))
  session = session_lib.open_session(resolving.build(resolved.config))
  step = compiled_steps.compile_train_step(session)
  batch = {
    name: jax.jit(
      lambda x=x: jnp.ones(x.shape, x.dtype), out_shardings=x.sharding
    )()
    for name, x in session.batch.items()
  }
  state = session.initial_state()

  def advance() -> Any:
    nonlocal state
    state, metrics = step(state, batch)
    return metrics

  seconds = _seconds(advance)
  stats = jax.local_devices()[0].memory_stats() or {}
  peak = stats.get("peak_bytes_in_use")
  if peak is None:
    sizes = step.memory_analysis()
    assert sizes is not None
    more = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    peak = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + more
  return peak, seconds


def to_markdown(found: Sequence[Comparison]) -> str:
  """Returns the table of comparisons, with date, device and versions."""
  device = jax.devices()[0].device_kind
  day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
  command = f"{jax.device_count()} x {device}, {day}, jax {jax.__version__}"
  lines = [
    f"`tools/gpu_check --plan`, {command}.",
    "",
    "| experiment | planned peak | measured peak | error | bound"
    " | planned step | measured step | error |",
    "| --- " * 8 + "|",
  ]
  for one in found:
    cells = [
      one.name,
      _mebibytes(one.planned_peak),
      _mebibytes(one.measured_peak),
      _error(float(one.planned_peak), float(one.measured_peak)),
      _milliseconds(one.bound),
      _milliseconds(one.planned_step),
      _milliseconds(one.measured_step),
      _error(one.planned_step, one.measured_step),
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _mebibytes(size: int) -> str:
  return f"{size / 2**20:,.1f} MiB"


def _milliseconds(seconds: float | None) -> str:
  return "-" if seconds is None else f"{1e3 * seconds:,.1f} ms"


def _error(planned: float | None, measured: float) -> str:
  return "-" if planned is None else f"{100 * (planned / measured - 1):+.1f} %"


def write(page: pathlib.Path, table: str) -> None:
  """Replaces the table between the marks of a page.

  Raises:
    UserError: The page does not have the marks.
  """
  text = page.read_text() if page.exists() else f"{BEGIN}\n{END}\n"
  before, begin, rest = text.partition(BEGIN)
  _, end, after = rest.partition(END)
  if not begin or not end:
    raise user_error.UserError(f"{page} does not have {BEGIN!r} and {END!r}.")
  page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
  # The program that runs must be the planned one.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  sys.exit(main(sys.argv[1:]))
