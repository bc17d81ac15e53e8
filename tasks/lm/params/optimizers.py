"""The quickstart and a 2 B model under each optimizer of docs/optimizers.md."""

from collections.abc import Mapping
import dataclasses
from typing import Any, Final

import fiddle as fdl
import optax
from optax import contrib

from paxon.learners.optimizers import (
  adafactor,
  adam_8bit,
  adam_mini,
  adamw,
  cautious,
  kron,
  lion,
  muon,
  optax_optimizer,
  sgd,
  shampoo,
  soap,
  sophia,
)
from paxon.sharding import suggestions
from paxon.tasks.lm.params import lm_cloud, quickstart


@dataclasses.dataclass(frozen=True)
class Choice:
  """An optimizer with its rate for the quickstart.

  Attributes:
    kind: Class of ours, or function of optax.
    rate: Peak of the learning rate.
    fields: Its other arguments.
    decays: Whether it takes `weight_decay`.
  """

  kind: Any
  rate: float
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  decays: bool = True


# Names are those of docs/optimizers.md.
CHOICES: Final[Mapping[str, Choice]] = {
  "AdamW": Choice(adamw.AdamW, 0.008, {"b2": 0.99}),
  "8-bit Adam": Choice(adam_8bit.Adam8Bit, 0.008, {"b2": 0.99}),
  "Adam-mini": Choice(adam_mini.AdamMini, 0.008, {"b2": 0.99}),
  "Adafactor": Choice(adafactor.Adafactor, 0.04, decays=False),
  "Adafactor, int8 momentum": Choice(
    adafactor.Adafactor,
    0.08,
    {"b1": 0.9, "momentum_dtype": "int8"},
    decays=False,
  ),
  "Lion": Choice(lion.Lion, 0.002),
  "Lion, cautious": Choice(lion.Lion, 0.004),
  "Muon": Choice(muon.Muon, 0.02),
  "PSGD-Kron": Choice(kron.Kron, 0.008),
  "SGD": Choice(sgd.Sgd, 0.6, {"momentum": 0.9, "nesterov": True}),
  "Shampoo": Choice(
    shampoo.Shampoo,
    0.000125,
    {"graft": shampoo.Graft.RMSPROP, "start_step": 20, "roots_every": 10},
  ),
  "SOAP": Choice(soap.Soap, 0.016),
  "Sophia-H": Choice(sophia.Sophia, 0.002),
  "AdaBelief": Choice(optax.adabelief, 0.008, {"b2": 0.99}, decays=False),
  "Adagrad": Choice(optax.adagrad, 0.48, decays=False),
  "Adan": Choice(optax.adan, 0.016),
  "AdEMAMix": Choice(contrib.ademamix, 0.008, {"b2": 0.99}),
  "ADOPT": Choice(contrib.adopt, 0.004, decays=False),
  # The trust ratio of LAMB scales its decay too.
  "LAMB": Choice(optax.lamb, 0.01, {"b2": 0.99, "weight_decay": 0.1}),
  "LARS": Choice(optax.lars, 8.0, decays=False),
  "NovoGrad": Choice(optax.novograd, 0.08),
  # Its rate is a factor of the one that it estimates.
  "Prodigy": Choice(
    contrib.prodigy, 8.0, {"betas": (0.9, 0.99), "weight_decay": 0.1}
  ),
  "Schedule-free AdamW": Choice(contrib.schedule_free_adamw, 0.008),
  "Yogi": Choice(optax.yogi, 0.016, {"b2": 0.99}, decays=False),
}


def _find(name: str) -> Choice:
  """Returns the optimizer of this name.

  Raises:
    ValueError: There is none.
  """
  if name not in CHOICES:
    raise ValueError(
      f"optimizer_name {name!r} is not in the table of docs/optimizers.md"
      f"{suggestions.suggest(name, CHOICES)}"
    )
  return CHOICES[name]


def _configure(
  name: str, schedule: fdl.Config[Any], weight_decay: float
) -> fdl.Config[Any]:
  """Returns an optimizer.

  Args:
    name: Its name.
    schedule: Its learning rate.
    weight_decay: Share of a parameter that is subtracted at rate 1, by those
      that take one and have none of their own.
  """
  choice = _find(name)
  fields = dict(choice.fields)
  if choice.decays:
    fields.setdefault("weight_decay", weight_decay)
  if choice.kind.__module__.startswith("optax"):
    make = fdl.Partial(choice.kind, **fields)
    return fdl.Config(
      optax_optimizer.OptaxOptimizer, schedule=schedule, make=make
    )
  made = fdl.Config(choice.kind, schedule=schedule, **fields)
  if name == "Lion, cautious":
    return fdl.Config(cautious.Cautious, optimizer=made)
  return made


class PythonStdlibOptimizer(quickstart.PythonStdlibLm):
  """The quickstart with an optimizer by name, at its tuned rate.

  All optimizers with decoupled weight decay subtract the same share of the
  parameters in a step.

  Attributes:
    optimizer_name: A name of the table in docs/optimizers.md.
    rate_factor: Multiplies the tuned rate.
  """

  optimizer_name: str = "AdamW"
  rate_factor: float = 1.0

  def optimizer(self) -> fdl.Config[Any]:
    """Returns the optimizer."""
    rate = _find(self.optimizer_name).rate * self.rate_factor
    share = self.weight_decay * self.peak_learning_rate
    return _configure(self.optimizer_name, self.schedule(rate), share / rate)


class LmCloudSpmd2BOptimizer(lm_cloud.LmCloudSpmd2B):
  """`LmCloudSpmd2B` on 64 devices with an optimizer by name.

  For plans: no rate is tuned for it.

  Attributes:
    optimizer_name: A name of the table in docs/optimizers.md.
  """

  optimizer_name: str = "AdamW"
  global_batch_size = 512
  mesh = "fsdp=64"

  def optimizer(self) -> fdl.Config[Any]:
    """Returns the optimizer."""
    return _configure(self.optimizer_name, self.schedule(), self.weight_decay)
