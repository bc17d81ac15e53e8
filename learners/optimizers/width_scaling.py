"""Maximal update parametrization (muP): settings that transfer to other widths.

In muP the changes of activations in a step do not depend on the width, so the
best learning rate of a narrow model is that of a wide one (Yang et al. 2022,
https://arxiv.org/abs/2203.03466, table 8, for Adam and its relatives). Relative
to a base model, with r = fan-in / fan-in of the base model:

                      initial variance     factor of the output   learning rate
  inputs, vectors     as in the base       1                      1
  hidden kernels      base / r             1                      1 / r
  output kernels      as in the base       1 / r                  1

`WidthScaled` divides the learning rates of hidden kernels, around any optimizer
whose updates do not depend on the size of gradients. Initial values scaled by
the fan-in, the default of the layers, are those of the table for hidden
kernels. Of a model, set

  Embedding(embedding_init=nn.initializers.normal(1.0))
  Unembedding(
    kernel_init=nn.initializers.normal(s), input_scale=base_width / width
  )

with the same s for all widths. Keep `head_dim` fixed and add heads; otherwise
also scale the logits of attention by 1 / head_dim.
"""

from collections.abc import Mapping
import dataclasses
import math

import jax
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import matrix_view
from paxon.learners.optimizers import optimizer as optimizer_lib
from paxon.sharding import axes as axis_names
from paxon.sharding import variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class WidthScaled(optimizer_lib.OptimizerWrapper):
  """An optimizer with the learning rates of muP.

  Attributes:
    optimizer: The optimizer, with the learning rate of the base model.
    base_widths: Sizes of the base model by logical axis, such as `{"embed": 64,
      "mlp": 256, "heads": 4}`. The other axes have a fixed size.
  """

  optimizer: optimizer_lib.Optimizer
  base_widths: Mapping[str, int]

  def __post_init__(self) -> None:
    if not self.base_widths:
      raise ValueError("WidthScaled.base_widths must name an axis.")
    for axis, size in self.base_widths.items():
      if axis not in axis_names.LOGICAL_AXES:
        raise ValueError(
          f"WidthScaled.base_widths: {axis!r} is no logical axis, such as"
          f" {axis_names.EMBED!r}."
        )
      if size <= 0:
        raise ValueError(
          f"WidthScaled.base_widths[{axis!r}] must be positive, got {size}."
        )

  def factor(self, spec: variables.VariableSpec) -> float:
    """Returns the factor of the learning rate of a variable."""
    sides = matrix_view.find_sides(spec)
    if sides is None:
      return 1.0
    is_hidden = all(
      any(spec.axes[i] in self.base_widths for i in side) for side in sides
    )
    if not is_hidden:
      return 1.0
    return math.prod(
      self.base_widths[axis] / spec.shape[i]
      for i in sides.inputs
      if (axis := spec.axes[i]) in self.base_widths
    )

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule.

    The decay of a parameter is scaled like its learning rate.

    Raises:
      ValueError: `specs` is `None`.
    """
    if specs is None:
      raise ValueError("WidthScaled.transform requires the specs of variables.")
    factors = jax.tree.map(self.factor, specs)
    return optimizer_lib.append_stateless(
      self.optimizer.transform(specs),
      lambda updates, _: jax.tree.map(lambda u, f: u * f, updates, factors),
    )
