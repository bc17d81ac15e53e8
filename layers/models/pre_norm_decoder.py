"""Puts a decoder-only language model of equal pre-norm layers together.

One composition for experiments, tests and benchmarks. What is made of a class
and its fields is said by the caller: with `make=fdl.Config` it is a
configuration, whose every field can still be changed; with `make=build` it is
the module itself. So this package needs no Fiddle.
"""

from collections.abc import Callable
from typing import Any

from paxon.layers import block, remat, stack
from paxon.layers.models import decoder_lm

# `(class, **fields) -> part`.
Make = Callable[..., Any]


def build(cls: Callable[..., Any], /, **fields: Any) -> Any:
  """Returns `cls(**fields)`: the `make` of modules."""
  return cls(**fields)


def compose(
  make: Make,
  *,
  embedding: Any,
  norm: Callable[[], Any],
  attention: Any,
  feed_forward: Any,
  num_layers: int,
  scan: bool = True,
  remat_policy: remat.Policy | None = None,
  **fields: Any,
) -> Any:
  """Returns a `DecoderLm`, or what `make` makes of it.

  Args:
    make: Called with a class and its fields.
    embedding: Of tokens; also the head where none is given.
    norm: Returns a new norm at each call; there are three in the model, and
      one part must not stand in several places.
    attention: Of each layer.
    feed_forward: Of each layer.
    num_layers: Number of layers.
    scan: Whether the compiled program loops over the layers.
    remat_policy: What layers save for the backward pass; `None` is everything.
    **fields: More of `DecoderLm`, such as `head` and `logit_cap`.
  """
  layer = make(
    block.TransformerBlock,
    attention_norm=norm(),
    attention=attention,
    feed_forward_norm=norm(),
    feed_forward=feed_forward,
  )
  layers = make(
    stack.Stack,
    blocks=[layer],
    num_layers=num_layers,
    scan=scan,
    remat_policy=remat_policy,
  )
  return make(
    decoder_lm.DecoderLm,
    embedding=embedding,
    stack=layers,
    final_norm=norm(),
    **fields,
  )
