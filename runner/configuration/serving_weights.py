"""A configuration whose weights are stored in few bits.

What rules have quantized for training (`quantizing`) is turned into products
that read stored weights. Nothing else changes, so the same rules say which
layers are served quantized.
"""

from collections.abc import Sequence

import fiddle as fdl

from paxon.layers import edged_stack, precision
from paxon.layers.attention import kernels
from paxon.quantization import einsum as quantized
from paxon.quantization import products, served_einsum
from paxon.runner import user_error
from paxon.runner.configuration import tree


def serve(config: fdl.Buildable) -> list[str]:
  """Stores the weights of quantized products, in place.

  Products of two activations, those inside of attention, have no weights: they
  are computed in the layer's dtype, and what they read is the cache's matter.
  So is the head, whose products are computed in chunks, and a lookup.

  Args:
    config: The root, quantized by rules.

  Returns:
    The paths of the layers whose weights are stored.

  Raises:
    user_error.UserError: The rules leave no layer whose weights can be stored,
      or exempt layers of a stack by their number.
  """
  changed = []
  for path, node in list(tree.nodes(config)):
    if fdl.get_callable(node) is kernels.PlainKernel:
      continue
    for field in ("einsum", "kernel"):
      if not tree.is_set(node, field):
        continue
      value = node.__arguments__[field]
      if not isinstance(value, fdl.Buildable):
        continue
      target = fdl.get_callable(value)
      if target is kernels.PlainKernel:
        node.kernel = kernels.plain
      elif target is quantized.QuantizedEinsum:
        if products.HEAD in products.roles_of(fdl.get_callable(node)):
          node.einsum = precision.wide_einsum
          continue
        recipe = served_einsum.serving_recipe(value.recipe)
        node.einsum = fdl.Config(served_einsum.ServedEinsum, recipe=recipe)
        changed.append(path)
  if not changed:
    raise user_error.UserError(
      "quantization: no layer has weights that can be stored in few bits; the"
      " rules must have some of the roles attention_projections, feed_forward"
      " and experts."
    )
  _check_stacks(config, changed)
  return changed


def _check_stacks(config: fdl.Buildable, changed: Sequence[str]) -> None:
  """Refuses stacks of which some layers have stored weights, others have not.

  All layers of a stack are in the same arrays.
  """
  for path, node in tree.nodes(config):
    if fdl.get_callable(node) is not edged_stack.EdgedStack:
      continue
    blocks = tree.join(path, "blocks")
    if any(layer.startswith(f"{blocks}[") for layer in changed):
      raise user_error.UserError(
        f"quantization: the layers of {path} are stored together, all in few"
        " bits or none; leave ExemptLayers out of quantization_rules() where"
        " the knob says serve or convert, or exempt the blocks by a Rule."
      )
