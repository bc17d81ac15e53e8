"""A configuration whose weights are stored in few bits.

What rules have quantized for training (`quantizing`) is turned into products
that read stored weights. Nothing else changes, so the same rules say which
layers are served quantized.
"""

import fiddle as fdl

from paxon.layers import wide_einsum
from paxon.layers.attention import kernels, plain_kernel
from paxon.quantization import einsum as quantized
from paxon.quantization import roles, served_einsum
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
    user_error.UserError: The rules leave no layer whose weights can be stored.
  """
  changed = []
  for path, node in list(tree.nodes(config)):
    if fdl.get_callable(node) is plain_kernel.PlainKernel:
      continue
    for field in ("einsum", "kernel"):
      if not tree.is_set(node, field):
        continue
      value = node.__arguments__[field]
      if not isinstance(value, fdl.Buildable):
        continue
      target = fdl.get_callable(value)
      if target is plain_kernel.PlainKernel:
        node.kernel = kernels.plain
      elif target is quantized.QuantizedEinsum:
        if roles.HEAD in roles.of(fdl.get_callable(node)):
          node.einsum = wide_einsum.wide_einsum
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
  return changed
