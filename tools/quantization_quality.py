"""Losses of a model trained with and without quantization, compared.

A recipe is as good as bfloat16 if its mean loss is at most 1 % above, or at
most twice the spread of bfloat16's own seeds: what another seed does is no
fault of a recipe. The spread is the standard deviation of the seeds (with one
less in the denominator), the stricter reading of the word.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import math
from typing import Any, Final

BASE: Final = "bf16"
_SHARE: Final = 0.01
_SPREADS: Final = 2.0
_HEADINGS: Final = (
  "Training",
  "Loss, mean",
  "Spread",
  "To bf16",
  "Allowed",
  "",
  "Seeds",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
  """What was measured, and where.

  Attributes:
    experiment: The import path of its class.
    steps: Of each training.
    date: Of the last one.
    hardware: What they ran on, and with which jax.
    losses: Held-out loss in nats a token, by recipe and seed.
  """

  experiment: str
  steps: int
  date: str
  hardware: str
  losses: Mapping[str, Mapping[int, float]]

  def to_json(self) -> str:
    """Returns the text that `from_json` reads."""
    return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def from_json(text: str) -> Results:
  """Returns results from their text."""
  content = json.loads(text)
  content["losses"] = {
    recipe: {int(seed): float(loss) for seed, loss in losses.items()}
    for recipe, losses in content["losses"].items()
  }
  return Results(**content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A recipe beside bfloat16.

  Attributes:
    recipe: Its name.
    mean: Of the losses of all seeds.
    spread: Their standard deviation; NaN for one seed.
    difference: Of the mean to bfloat16's, as a share of that.
    allowed: The largest such share.
    holds: Whether it is no larger.
  """

  recipe: str
  mean: float
  spread: float
  difference: float
  allowed: float
  holds: bool


def rows(results: Results) -> list[Row]:
  """Returns a row for each recipe, that of bfloat16 first.

  Raises:
    ValueError: Nothing was measured for bfloat16, or a recipe has other seeds:
      means of different seeds are not compared.
  """
  if not results.losses.get(BASE):
    raise ValueError(f"There are no losses of {BASE} to compare with.")
  seeds = set(results.losses[BASE])
  base, spread = _statistics(results.losses[BASE].values())
  # Without a spread (one seed) only the share counts.
  allowed = max(_SHARE, 0.0 if math.isnan(spread) else _SPREADS * spread / base)
  found = []
  for recipe in (BASE, *(name for name in results.losses if name != BASE)):
    losses = results.losses[recipe]
    if set(losses) != seeds:
      raise ValueError(
        f"{recipe} was trained with the seeds {sorted(losses)}, and {BASE} with"
        f" {sorted(seeds)}; train both with the same."
      )
    mean, own_spread = _statistics(losses.values())
    difference = mean / base - 1
    found.append(
      Row(
        recipe=recipe,
        mean=mean,
        spread=own_spread,
        difference=difference,
        allowed=allowed,
        # A loss that is NaN does not hold.
        holds=difference <= allowed,
      )
    )
  return found


def to_markdown(results: Results) -> str:
  """Returns the table of results, and what it is."""
  lines: list[Sequence[Any]] = [_HEADINGS, ("---",) * len(_HEADINGS)]
  for row in rows(results):
    is_base = row.recipe == BASE
    losses = results.losses[row.recipe]
    lines.append(
      (
        f"`{row.recipe}`",
        f"{row.mean:.4f}",
        f"{row.spread:.4f}",
        "-" if is_base else f"{row.difference:+.2%}",
        "-" if is_base else f"{row.allowed:+.2%}",
        "-" if is_base else "holds" if row.holds else "**fails**",
        ", ".join(f"{losses[seed]:.4f}" for seed in sorted(losses)),
      )
    )
  table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
  name = results.experiment.rpartition(".")[2]
  return (
    f"{name}, {results.steps} steps; {results.date}, {results.hardware}."
    f" Held-out loss in nats a token.\n\n{table}"
  )


def _statistics(losses: Iterable[float]) -> tuple[float, float]:
  """Returns the mean and the spread of some losses; NaN if one is."""
  values = list(losses)
  mean = math.fsum(values) / len(values)
  if len(values) == 1:
    return mean, math.nan
  squares = math.fsum((value - mean) ** 2 for value in values)
  return mean, math.sqrt(squares / (len(values) - 1))
