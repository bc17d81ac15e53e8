"""Further questions to a plan: cost, sizes of a target, batches and lengths.

--plan_tokens=1e12 --plan_price=2.5          days, device-hours and money
--plan_tokens=1e12 --plan_days=30            the smallest target in time
--plan_batches=64,128 --plan_lengths=2048    one plan for each pair
--plan_batches=largest                       the largest batch that fits
--plan_decode=1x8192,64x8192                 decoding steps: sequences x slots
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math
import re
from typing import Final

from paxon.runner.plan import hardware, report, result, sections
from paxon.runner.plan import target as targets

BATCH: Final = "global_batch_size"
LENGTH: Final = "length"
# Larger grids, or searches of a size, would take hours.
MAX_CELLS: Final = 64
_LARGEST: Final = "largest"
_MAX_SIZES: Final = 8
_HOURS: Final = 3600.0
_PROGRAMS: Final = ("auto", "all", "train")
_SLICES: Final = (
  *("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
  *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
  *("8x8x16", "8x16x16", "16x16x16", "16x16x24", "16x16x32"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
  """Flags of `--mode=plan`, checked.

  Attributes:
    tokens: Tokens to train on.
    price: Price of a device-hour; a device is a chip or GPU.
    days: The time that training on `tokens` may take.
    batches: Values of `global_batch_size` to plan.
    wants_largest: Whether to find the largest batch that fits.
    lengths: Values of `length` to plan.
    programs: Programs to compile: `all`, `train`, or `auto`, which is all but
      on TPUs, where the compiler takes minutes.
    decode: Decoding steps to plan: sequences, and slots of their caches.
  """

  tokens: float | None = None
  price: float | None = None
  days: float | None = None
  batches: tuple[int, ...] = ()
  wants_largest: bool = False
  lengths: tuple[int, ...] = ()
  programs: str = "auto"
  decode: tuple[tuple[int, int], ...] = ()

  def has_others(self, target: targets.Target) -> bool:
    """Returns whether evaluation and decoding are compiled too."""
    is_tpu = target.hardware.platform is hardware.Platform.TPU
    return self.programs == "all" or (self.programs == "auto" and not is_tpu)

  def cells(self) -> list[dict[str, int]]:
    """Returns the knobs of each plan of the grid; empty without a grid."""
    if not (self.batches or self.lengths):
      return []
    return [
      {
        name: value
        for name, value in ((BATCH, batch), (LENGTH, length))
        if value is not None
      }
      for length, batch in itertools.product(
        self.lengths or (None,), self.batches or (None,)
      )
    ]


def parse(
  *,
  tokens: str | None = None,
  price: str | None = None,
  days: str | None = None,
  batches: str | None = None,
  lengths: str | None = None,
  programs: str = "auto",
  decode: str | None = None,
  is_searched: bool = False,
) -> Questions:
  """Returns the questions of the flags `--plan_...`.

  Raises:
    ValueError: A flag has a wrong value, or lacks another one.
  """
  for name, value in (("price", price), ("days", days)):
    if value is not None and tokens is None:
      raise ValueError(
        f"--plan_{name} requires --plan_tokens, the number of tokens to train"
        " on, such as --plan_tokens=1e12."
      )
  if programs not in _PROGRAMS:
    raise ValueError(
      f"--plan_programs={programs} must be one of {', '.join(_PROGRAMS)}."
    )
  found = Questions(
    tokens=_number("tokens", tokens, "1e12"),
    price=_number("price", price, "2.5"),
    days=_number("days", days, "30"),
    batches=()
    if batches == _LARGEST
    else _sizes("batches", batches, "64,128,256 or largest"),
    wants_largest=batches == _LARGEST,
    lengths=_sizes("lengths", lengths, "2048,8192"),
    programs=programs,
    decode=_pairs("decode", decode, "1x8192,64x8192"),
  )
  if found.decode and (found.cells() or is_searched):
    raise ValueError(
      "--plan_decode cannot be combined with --plan_search, --plan_batches or"
      " --plan_lengths."
    )
  if found.wants_largest:
    _check_alone(found, is_searched=is_searched)
  if len(found.cells()) > MAX_CELLS:
    raise ValueError(
      f"--plan_batches and --plan_lengths make {len(found.cells())} plans;"
      f" at most {MAX_CELLS} are made at once."
    )
  if is_searched and found.cells():
    raise ValueError(
      "--plan_search cannot be combined with --plan_batches or --plan_lengths;"
      " it varies neither the batch nor the length."
    )
  if found.days is not None and found.cells():
    raise ValueError(
      "--plan_days cannot be combined with --plan_batches or --plan_lengths;"
      " it changes the size of the target only."
    )
  return found


def _check_alone(found: Questions, *, is_searched: bool) -> None:
  """Raises ValueError if the largest batch is asked with other questions."""
  if is_searched or found.cells() or found.days is not None or found.decode:
    raise ValueError(
      "--plan_batches=largest cannot be combined with --plan_search,"
      " --plan_lengths, --plan_days or --plan_decode."
    )


def _number(name: str, text: str | None, example: str) -> float | None:
  if text is None:
    return None
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not (0 < value < math.inf):
    raise ValueError(
      f"--plan_{name}={text} must be a positive number, such as {example}."
    )
  return value


def _sizes(name: str, text: str | None, example: str) -> tuple[int, ...]:
  if text is None:
    return ()
  parts = [part.strip() for part in text.split(",")]
  if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
    raise ValueError(
      f"--plan_{name}={text} must be positive integers separated by commas,"
      f" such as {example}."
    )
  values = tuple(map(int, parts))
  if len(set(values)) < len(values):
    raise ValueError(f"--plan_{name}={text} has a value twice.")
  return values


def _pairs(
  name: str, text: str | None, example: str
) -> tuple[tuple[int, int], ...]:
  if text is None:
    return ()
  found = [
    re.fullmatch(r"0*([1-9][0-9]{0,8})x0*([1-9][0-9]{0,8})", part.strip())
    for part in text.split(",")
  ]
  pairs = [(int(m[1]), int(m[2])) for m in found if m]
  if len(pairs) < len(found) or len(set(pairs)) < len(pairs):
    raise ValueError(
      f"--plan_{name}={text} must be different pairs of positive integers, such"
      f" as {example}."
    )
  return tuple(pairs)


def answer(plan: result.Plan, asked: Questions) -> result.Plan:
  """Returns a plan with its training cost, without meaningless throughputs.

  Args:
    plan: A plan; its estimate is used, or its bound if it has none.
    asked: Tokens and price.
  """
  bound, notes = plan.bound, plan.notes
  if bound is not None and not sections.is_meaningful(bound):
    bound = dataclasses.replace(bound, tokens_per_second=None)
  rate = sections.tokens_per_second(plan)
  cost = None
  if asked.tokens is not None and rate:
    hours = asked.tokens / rate / _HOURS
    devices = hours * plan.num_chips
    cost = result.TrainingCost(
      tokens=asked.tokens,
      days=hours / 24,
      device_hours=devices,
      money=None if asked.price is None else devices * asked.price,
      is_lower_bound=plan.estimate is None,
    )
    if cost.is_lower_bound:
      notes += (
        "The time and price of training are lower bounds, because there is no"
        f" estimate of the step time{_without_communication(bound)}.",
      )
  elif asked.tokens is not None:
    notes += (
      "The time of training (--plan_tokens) is not known, because the step time"
      " is not known, or so short that the host limits it.",
    )
  return dataclasses.replace(plan, bound=bound, training_cost=cost, notes=notes)


def _without_communication(bound: result.Bound | None) -> str:
  if bound is None or sections.has_communication(bound):
    return ""
  return ", and the bound is without communication"


def sizes(target: targets.Target) -> list[targets.Target]:
  """Returns the targets of the same kind in all usual sizes, smallest first."""
  kind = target.hardware
  texts = list(_SLICES)
  if kind.platform.has_hosts:
    chips = kind.devices_per_host // kind.devices_per_chip
    texts = [f"1x{n}" for n in (1, 2, 4, 8)]
    texts += [f"{2**n}x{chips}" for n in range(12)]
  elif kind.platform is hardware.Platform.CPU:
    texts = [str(2**n) for n in range(10)]
  found = {target.text: target}
  for text in texts:
    try:
      one = targets.parse(f"{kind.name}:{text}")
    except ValueError:
      # Not a slice of this kind.
      continue
    found.setdefault(one.text, one)
  return sorted(found.values(), key=lambda each: each.num_chips)


@dataclasses.dataclass(frozen=True)
class Size:
  """A size that was planned: its plan, or the reason why there is none."""

  target: targets.Target
  plan: result.Plan | result.Failure

  def is_enough(self, days: float) -> bool:
    """Returns whether training fits into the memory and the time."""
    plan = self.plan
    return (
      isinstance(plan, result.Plan)
      and plan.memory.fit is not result.Fit.DOES_NOT_FIT
      and plan.training_cost is not None
      and plan.training_cost.days <= days
    )

  @property
  def is_unknown(self) -> bool:
    """Whether there is a plan, but no time of training."""
    return (
      isinstance(self.plan, result.Plan) and self.plan.training_cost is None
    )


def find_size(
  first: Size,
  days: float,
  make: Callable[[targets.Target], result.Plan | result.Failure],
) -> list[Size]:
  """Plans sizes of a target's kind until the smallest that is fast enough.

  The first guess takes the time as proportional to 1 / devices.

  Args:
    first: The target of the command line with its plan.
    days: The time that training may take.
    make: Makes the plan of another size.

  Returns:
    All that were planned, the smallest first.
  """
  options = sizes(first.target)
  index = options.index(first.target)
  tried = {index: first}
  plan = first.plan
  cost = plan.training_cost if isinstance(plan, result.Plan) else None
  if cost is not None:
    wanted = first.target.num_chips * cost.days / days
    above = [i for i, o in enumerate(options) if o.num_chips >= wanted]
    index = above[0] if above else len(options) - 1
  while len(tried) < _MAX_SIZES:
    if index not in tried:
      tried[index] = Size(options[index], make(options[index]))
    if tried[index].is_unknown:
      break
    step = -1 if tried[index].is_enough(days) else 1
    index += step
    is_turned = index in tried and tried[index].is_enough(days) == (step > 0)
    if is_turned or not 0 <= index < len(options):
      break
  return [tried[i] for i in sorted(tried)]


def to_size_table(found: Sequence[Size], days: float) -> str:
  """Returns the sizes as a table, and the answer as its last line."""
  plans = [s.plan for s in found if isinstance(s.plan, result.Plan)]
  failures = [
    dataclasses.replace(s.plan, target=s.target.text)
    for s in found
    if isinstance(s.plan, result.Failure)
  ]
  enough = [size for size in found if size.is_enough(days)]
  last = f"none of these trains within {to_days(days)}"
  if enough:
    last = (
      f"{enough[0].target} is the smallest that trains within {to_days(days)}"
    )
  elif any(size.is_unknown for size in found):
    last = "the time of training is not known"
  return f"{report.to_table(plans, failures)}\n{last}"


def to_days(days: float) -> str:
  """Returns a number of days as text."""
  return f"{days:g} day{'' if days == 1 else 's'}"


def best(
  plans: Sequence[result.Plan | result.Failure],
) -> result.Plan | None:
  """Returns the plan with the most tokens/s that fits, else the smallest.

  A bound is above every estimate, so plans without an estimate count only if
  none has one.
  """
  made = [plan for plan in plans if isinstance(plan, result.Plan)]
  fit = [p for p in made if _may_fit(p)]
  if not fit:
    # The TPU compiler rejects a program without the peak that it needs.
    return min(
      made,
      key=lambda p: math.inf if p.memory.peak is None else p.memory.peak,
      default=None,
    )
  known = [plan for plan in fit if plan.estimate is not None]
  return max(known or fit, key=_speed)


def _may_fit(plan: result.Plan) -> bool:
  return plan.memory.fit is not result.Fit.DOES_NOT_FIT


def _speed(plan: result.Plan) -> float:
  return sections.tokens_per_second(plan) or 0.0
