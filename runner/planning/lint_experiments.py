"""Experiments that are wrong for a mesh, one for each rule of the lint."""

from typing import Literal

import fiddle as fdl
from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.runner import task as task_lib
from paxon.runner.training import testing
from paxon.sharding import axes, logical
from paxon.sharding import rules as rules_lib


class Experts(nn.Module):
  """The sum of experts, all of which see every token.

  Attributes:
    num_experts: How many.
  """

  num_experts: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns an array like `x`."""
    init = logical.partitioned(
      nn.initializers.lecun_normal(), (axes.EXPERTS, axes.EMBED, None)
    )
    width = x.shape[-1]
    kernel = self.param("kernel", init, (self.num_experts, width, width))
    return jnp.einsum("BTD,EDF->BTF", x, kernel)


class Square(nn.Module):
  """A kernel both of whose dimensions are called `embed`."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns an array like `x`."""
    init = logical.partitioned(
      nn.initializers.lecun_normal(), (axes.EMBED, axes.EMBED)
    )
    kernel = self.param("kernel", init, (x.shape[-1], x.shape[-1]))
    return x @ kernel


class Wrong(testing.TinyLm):
  """Right as it is; what is wrong is set by knobs and by the mesh.

  Attributes:
    feed_forward: The layer that takes the place of the gated one.
    num_experts: Of `experts`.
    rule: Fault of the sharding rules.
  """

  feed_forward: Literal["gated", "experts", "square"] = "gated"
  num_experts: int = 6
  rule: Literal["right", "twice", "unknown", "unsplit", "idle"] = "right"

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the tiny model with another feed-forward layer."""
    config = super().task()
    block = config.model.stack.blocks[0]
    number = self.num_experts
    if self.feed_forward == "experts":
      block.feed_forward = fdl.Config(Experts, num_experts=number)
    elif self.feed_forward == "square":
      block.feed_forward = fdl.Config(Square)
    return config

  def sharding_rules(self) -> rules_lib.Rules:
    """Returns the default rules, with one in place of theirs."""
    other: dict[str, tuple[str, rules_lib.MeshAxes]] = {
      "twice": (axes.BATCH, ("data", "fsdp", "data")),
      "unknown": (axes.BATCH, "replica"),
      "unsplit": (axes.EMBED, None),
      "idle": (axes.BATCH, "data"),
    }
    if self.rule == "right":
      return rules_lib.DEFAULT_RULES
    name, entry = other[self.rule]
    return tuple(
      (axis, entry if axis == name else value)
      for axis, value in rules_lib.DEFAULT_RULES
    )
