"""Roles: what the products of a layer are for, as rules of quantization say it.

A layer whose field `einsum` may be replaced names the roles of its products in
the class attribute `quantization_roles`. A layer of one's own does the same:

```python
class MyFeedForward(nn.Module):
  einsum: Callable[..., jax.Array] = jnp.einsum

  quantization_roles: ClassVar[tuple[str, ...]] = (roles.FEED_FORWARD,)
```
"""

from typing import Final

# Queries, keys and values of tokens, and tokens of what heads gathered.
ATTENTION_PROJECTIONS: Final = "attention_projections"
# Queries with keys, and weights with values.
ATTENTION_PRODUCTS: Final = "attention_products"
FEED_FORWARD: Final = "feed_forward"
# Feed-forward layers of which each token takes some.
EXPERTS: Final = "experts"
# The table of an embedding as a head.
EMBEDDING: Final = "embedding"
# Logits, by a table or by a kernel of their own.
HEAD: Final = "head"
# `Linear` and `Einsum`, which may be anything; rules name them by their path.
LINEAR: Final = "linear"

ALL: Final = (
  ATTENTION_PROJECTIONS,
  ATTENTION_PRODUCTS,
  FEED_FORWARD,
  EXPERTS,
  EMBEDDING,
  HEAD,
  LINEAR,
)

_ATTRIBUTE = "quantization_roles"


def of(layer: object) -> tuple[str, ...]:
  """Returns the roles of a layer, or of its class; none if it names none."""
  return tuple(getattr(layer, _ATTRIBUTE, ()))
