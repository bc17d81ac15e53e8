"""Composition of a decoder-only language model with equal pre-norm layers.

For experiments, tests and benchmarks. `make=fdl.Config` composes a
configuration, `make=build` the module, so this package does not need Fiddle.
"""

from collections.abc import Callable
from typing import Any

from paxon.layers import remat
from paxon.layers.models import decoder_lm
from paxon.layers.stacks import block, stack

# `(class, **fields) -> module or configuration`.
Make = Callable[..., Any]


def build(cls: Callable[..., Any], /, **fields: Any) -> Any:
  """Returns `cls(**fields)`, for `make=build`."""
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
  """Returns a `DecoderLm` built by `make(cls, **fields)`.

  The embedding is also the head unless `head` is given. `norm` returns a new
  norm in each call, because modules must not be shared. `scan` loops over the
  layers; `remat_policy` is that of the stack. `fields` are further fields of
  `DecoderLm`.
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
