"""Plans compared with runs: peak memory and step time of experiments.

The plan is made for the devices of this machine by a separate process, and the
same experiment then runs. Devices report the peak memory since their process
started, so each case needs a separate process.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any, Final

import jax

from paxon.runner import user_error
from paxon.runner.configuration import overrides
from paxon.runner.plan import hardware
from paxon.runner.plan import target as targets
from paxon.runner.planning import child
from paxon.tasks.gpu_check import isolation, runs

BEGIN: Final = "<!-- gpu_check begins -->"
END: Final = "<!-- gpu_check ends -->"
_PLAN_LIMIT: Final = 60.0
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
    title: Name in tables.
    experiment: Value of `--exp`.
    knobs: Assignments of `--fdl.`.
  """

  title: str
  experiment: str
  knobs: tuple[tuple[str, str], ...]


CASES: Final[Mapping[str, Case]] = {
  "gpt2": Case("GPT-2 124M", "tasks.lm.params.gpt2.Gpt2Small124M", (_CUDNN,)),
  "llama": Case("Llama 2 7B, 4 layers", _LLAMA, _SHORT),
  "one_document": Case(
    "Llama 2 7B, 4 layers, one document", _LLAMA, (*_SHORT, _CUDNN)
  ),
  "no_remat": Case(
    "Llama 2 7B, 4 layers, no remat", _LLAMA, (*_SHORT, _NO_REMAT)
  ),
}
# The same names, so that a dry run has the same checks.
TINY_CASES: Final[Mapping[str, Case]] = {
  "gpt2": Case("tiny", _LLAMA, _TINY),
  "llama": Case(
    "tiny, microbatches", _LLAMA, (*_TINY, ("num_microbatches", "2"))
  ),
  "one_document": Case("tiny, wider", _LLAMA, (*_TINY, ("mlp_dim", "512"))),
  "no_remat": Case("tiny, no remat", _LLAMA, (*_TINY, _NO_REMAT)),
}


def check(settings: isolation.Settings, *, name: str) -> isolation.Facts:
  """Plans a case for the devices of this machine, and runs it.

  Args:
    settings: Of all checks.
    name: A key of `CASES`.
  """
  case = (TINY_CASES if settings.is_dry else CASES)[name]
  given = [overrides.Override(*knob) for knob in case.knobs]
  plan = child.plan(
    case.experiment,
    given,
    find_target(),
    is_compiled=True,
    time_limit=_PLAN_LIMIT,
  )
  facts: dict[str, Any] = {
    "title": case.title,
    "planned_peak_bytes": plan.memory.peak,
    "planned_step_seconds": plan.estimate and plan.estimate.step,
    "bound_seconds": plan.bound and plan.bound.step,
  }
  if plan.memory.peak is None:
    reasons = " ".join(plan.notes)
    raise isolation.CheckError(f"the plan was not compiled: {reasons}", facts)
  steps = runs.start(case.experiment, case.knobs)
  seconds = steps.measure(blocks=3, steps=1 if settings.is_dry else 4)
  peak = runs.peak_memory(steps.step)
  facts |= {
    "measured_peak_bytes": peak,
    "measured_step_seconds": seconds,
    "peak_error": plan.memory.peak / peak - 1,
  }
  if plan.estimate is not None:
    facts["step_error"] = plan.estimate.step / seconds - 1
  return facts


def find_target() -> targets.Target:
  """Returns the target that these devices are.

  Raises:
    UserError: They are neither GPUs of a known kind nor CPUs.
  """
  device, number = jax.devices()[0], jax.device_count()
  kind = hardware.find_by_device_kind(device.device_kind)
  if kind is None or kind.platform is hardware.Platform.TPU:
    raise user_error.UserError(
      f"Plans are compared on GPUs and CPUs, not on {device.device_kind}."
    )
  if kind.platform is hardware.Platform.CPU:
    return targets.parse(f"cpu:{number}")
  per_host = jax.local_device_count()
  return targets.parse(f"{kind.name}:{number // per_host}x{per_host}")


def to_markdown(found: Sequence[isolation.Facts], *, conditions: str) -> str:
  """Returns the table of comparisons.

  Args:
    found: Result of `check`.
    conditions: Date, devices and versions.
  """
  lines = [
    f"`tools/gpu_check`, {conditions}.",
    "",
    "| experiment | planned peak | measured peak | error | bound"
    " | planned step | measured step | error |",
    "| --- " * 8 + "|",
  ]
  for one in found:
    cells = [
      one["title"],
      _format_bytes(one["planned_peak_bytes"]),
      _format_bytes(one["measured_peak_bytes"]),
      _format_error(one["peak_error"]),
      _format_time(one["bound_seconds"]),
      _format_time(one["planned_step_seconds"]),
      _format_time(one["measured_step_seconds"]),
      _format_error(one.get("step_error")),
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _format_bytes(size: int) -> str:
  return f"{size / 2**20:,.1f} MiB"


def _format_time(seconds: float | None) -> str:
  return "-" if seconds is None else f"{1e3 * seconds:,.1f} ms"


def _format_error(error: float | None) -> str:
  return "-" if error is None else f"{100 * error:+.1f} %"


def write_page(page: pathlib.Path, table: str) -> None:
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
