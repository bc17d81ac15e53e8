"""A tiny experiment with parts of every kind, for tests of configuration."""

from collections.abc import Callable
import dataclasses
import enum
from typing import Literal

import fiddle as fdl
from flax import linen as nn
import jax
from jax.typing import DTypeLike
import numpy as np

from paxon.inputs import base_input
from paxon.learners import learner, schedules
from paxon.learners.optimizers import adamw
from paxon.runner import experiment, task


class Color(enum.Enum):
  """A closed choice."""

  RED = 1
  BLUE = 2


class Layer(nn.Module):
  """A part with a field of every kind; it computes nothing."""

  width: int
  rate: float = 0.0
  bias: bool = False
  limit: int | None = None
  kind: Literal["a", "b"] = "a"
  word: str = ""
  sizes: tuple[int, ...] = (1, 2)
  words: tuple[str, ...] = ()
  table: dict[str, int] = dataclasses.field(default_factory=dict)
  color: Color = Color.RED
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
  inner: nn.Module | None = None
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = np.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.width <= 0:
      raise ValueError(f"Layer.width must be positive,\ngot {self.width}.")


class Model(nn.Module):
  """Some layers, and the method that tasks ask for."""

  layers: tuple[nn.Module, ...]
  head: nn.Module | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns `x`."""
    return x

  def loss(self, batch: object, *, deterministic: bool) -> object:
    """Returns the batch."""
    del deterministic
    return batch


@dataclasses.dataclass(kw_only=True, eq=False)
class Input(base_input.BaseInput):
  """An endless input of zeros."""

  fill: float = 0.0

  def get_next(self) -> base_input.Batch:
    """Returns rows that hold `fill`."""
    shape = self.global_batch_size, self.length
    return {"inputs": np.full(shape, self.fill, np.int32)}

  def reset(self) -> None:
    """Does nothing: there is no position."""

  def get_state(self) -> base_input.State:
    """Returns nothing to remember."""
    return {}

  def set_state(self, state: base_input.State) -> None:
    """Does nothing: there is no position."""


class Toy(experiment.Experiment):
  """A toy for tests.

  Attributes:
    width: Width of the
      head.
  """

  num_train_steps = 4
  global_batch_size = 2
  width: int = 8
  rate: float = 0.5
  depth: int = 2

  def task(self) -> fdl.Config[task.Task]:
    """Returns a task whose layers are one shared part and one of their own."""
    shared = fdl.Config(Layer, width=self.width, rate=self.rate)
    blocks = (shared,) * (self.depth - 1)
    optimizer = fdl.Config(
      adamw.AdamW,
      schedule=fdl.Config(
        schedules.WarmupCosine,
        peak=1e-3,
        warmup_steps=1,
        total_steps=self.num_train_steps,
      ),
    )
    return fdl.Config(
      task.Task,
      name=self.name,
      model=fdl.Config(
        Model, layers=(*blocks, fdl.Config(Layer, width=4)), head=shared
      ),
      learner=fdl.Config(learner.Learner, optimizer=optimizer),
    )

  def datasets(self) -> dict[str, fdl.Config[base_input.BaseInput]]:
    """Returns two splits of the same input."""
    return {
      split: fdl.Config(
        Input, global_batch_size=self.global_batch_size, length=4
      )
      for split in ("train", "validation")
    }
