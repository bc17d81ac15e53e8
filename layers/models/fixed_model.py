"""A model in another one that training never changes: a reference or a teacher.

Its parameters are in the collection `frozen`: they have no gradient and no
optimizer state, and a checkpoint and the memory of a plan include them. A warm
start reads them like other variables, from the same or another checkpoint.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax

from paxon.layers import summaries
from paxon.layers.losses import auxiliary_loss
from paxon.sharding import variables

COLLECTION = variables.FROZEN
_SOWN = (
  "intermediates",
  auxiliary_loss.COLLECTION,
  *summaries.COLLECTIONS,
)


class FixedModel(nn.Module):
  """A whole model with parameters `frozen/<field>/...`, never trained.

  Attributes:
    model: The model. Its variables must all be parameters.
  """

  model: nn.Module

  @nn.compact
  def __call__(
    self, *args: Any, method: str | Callable[..., Any], **kwargs: Any
  ) -> Any:
    """Calls a method of the model, or a function of it, without gradient.

    Raises:
      ValueError: The model has variables that are not parameters.
    """
    blank = self.model.copy(parent=None, name=None)
    if self.is_initializing():
      # A constant key; `sharding.initialization` computes the real values.
      made = blank.init(jax.random.key(0), *args, method=method, **kwargs)
      if others := sorted(made.keys() - {"params", *_SOWN}):
        raise ValueError(
          f"A fixed model must have parameters only, got the collection"
          f" {others[0]!r} of {type(self.model).__name__}."
        )
      for name, value in made["params"].items():
        self.put_variable(
          COLLECTION,
          name,
          jax.tree.map(
            lambda box: box.replace(trainable=False),
            value,
            is_leaf=lambda leaf: isinstance(leaf, variables.Variable),
          ),
        )
    params = variables.unbox(self.variables[COLLECTION])
    params = jax.lax.stop_gradient(params)
    return blank.apply({"params": params}, *args, method=method, **kwargs)
