"""Named products: how layers call the contraction that they were given.

A layer's field `einsum` holds a function like `jnp.einsum`, or a provider
(`quantization.einsum.QuantizedEinsum`), which keeps something for each product:
scales, for one. So layers name their products:

```python
gate = products.call(self.einsum, "gate", "BTD,DF->BTF", x, kernel)
```

A plain function is called without the name, so it need not know of names.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax

Einsum = Callable[..., jax.Array]

# What says that something wants the name of a product.
_ATTRIBUTE = "takes_product"


def is_provider(einsum: Einsum) -> bool:
  """Whether a contraction wants to know which product it computes."""
  return getattr(einsum, _ATTRIBUTE, False)


def call(
  einsum: Einsum,
  name: str,
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  **more: Any,
) -> jax.Array:
  """Returns a product of a layer.

  Args:
    einsum: The layer's contraction.
    name: Of the product, unlike those of the layer's other products; that of
      the kernel, as a rule.
    equation: As of `jnp.einsum`, with two operands.
    lhs: Activations.
    rhs: The kernel, or other activations.
    **more: Other keywords of the contraction, as `preferred_element_type`.
  """
  if is_provider(einsum):
    more["product"] = name
  return einsum(equation, lhs, rhs, **more)


def named(einsum: Einsum, name: str) -> Einsum:
  """Returns a contraction for a part of a layer that has one product.

  A layer gives its own contraction to a part that it makes, such as a `Linear`;
  the part's product gets a name that is the layer's to choose.

  Args:
    einsum: The layer's contraction.
    name: Of the product, whatever the part calls it.
  """
  if not is_provider(einsum):
    return einsum
  return functools.partial(einsum, product=name)
