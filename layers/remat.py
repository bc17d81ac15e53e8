"""What a stack keeps of its forward pass for the backward pass.

A policy says which intermediate values of a block are saved; the others are
computed again ("rematerialized"). A stack without a policy saves everything.
Layers give their large intermediate values the names below, and `save_only`
makes a policy that saves the named ones alone.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Final

import jax
from jax import ad_checkpoint

Policy = Callable[..., Any]

# Rotated queries and keys, and values: what the attention kernel is given.
ATTENTION_QUERY: Final = "attention_query"
ATTENTION_KEY: Final = "attention_key"
ATTENTION_VALUE: Final = "attention_value"
# What the kernel gives back, and that after the output projection.
ATTENTION_CONTEXT: Final = "attention_context"
ATTENTION_OUTPUT: Final = "attention_output"
# The widest tensor of a feed-forward layer, and its output.
FEED_FORWARD_HIDDEN: Final = "feed_forward_hidden"
FEED_FORWARD_OUTPUT: Final = "feed_forward_output"


def save_nothing(*args: Any, **params: Any) -> Any:
  """Policy: keep the input of each block only; least memory, one more pass."""
  return jax.checkpoint_policies.nothing_saveable(*args, **params)


def save_projections(*args: Any, **params: Any) -> Any:
  """Policy: keep matrix products with weights, not those of attention."""
  policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return policy(*args, **params)


@dataclasses.dataclass(frozen=True)
class SaveOnly:
  """Policy: keep the values with these names. Equal names, equal policies.

  Attributes:
    names: Names given by `tag`, usually constants of this module.
  """

  names: tuple[str, ...]

  def __post_init__(self) -> None:
    if not self.names:
      raise ValueError(
        "SaveOnly.names must not be empty; use `save_nothing` to keep only "
        "the input of each block."
      )

  def __call__(self, *args: Any, **params: Any) -> Any:
    """Answers JAX's question whether one value is kept."""
    policy = jax.checkpoint_policies.save_only_these_names(*self.names)
    return policy(*args, **params)


def save_only(*names: str) -> SaveOnly:
  """Returns the policy that keeps the values with these names alone."""
  return SaveOnly(names)


def tag(x: jax.Array, name: str) -> jax.Array:
  """Returns `x`, known to policies as `name`."""
  return ad_checkpoint.checkpoint_name(x, name)
