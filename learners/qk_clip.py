"""QK-clip: smaller kernels of queries and keys where logits are too large.

For query head n with the largest logit m_n of a step, after its update:

  c_n = min(1, threshold / m_n),  c = min of c_n over the heads with one key
  query_n <- query_n c_n / sqrt(c)
  key     <- key sqrt(c)

so that the logits of head n are multiplied by c_n and those of heads below the
threshold are kept (Kimi K2, https://arxiv.org/abs/2507.20534, section 2.1; with
one query head per key, both kernels are multiplied by sqrt(c_n)). Together with
`muon` this is MuonClip.

Layers record their largest logits in the collection `max_logits`
(`layers.attention.max_logits`). Biases are scaled like kernels.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.learners import metrics as metrics_lib
from paxon.learners import variable_groups
from paxon.sharding import axes as axis_names
from paxon.sharding import checks, variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class QkClip:
  """Scaling of kernels by the largest logits.

  Attributes:
    threshold: Largest logit that is kept.
  """

  threshold: float = 100.0

  def __post_init__(self) -> None:
    checks.check_positive(self, "threshold")

  def apply(
    self, params: Any, maxima: Any, *, specs: variable_groups.Specs
  ) -> tuple[Any, dict[str, metrics_lib.Weighted]]:
    """Returns the parameters with scaled kernels, and metrics.

    The metrics are `max_attention_logit`, the largest of all heads, and
    `clipped_heads`, the share of heads above the threshold.

    Args:
      params: Optimized variables, after their update.
      maxima: Collections that the forward pass returned.
      specs: Specs of all variables.

    Raises:
      ValueError: No layer records its logits, or one that does has other
        parameters than `query` and `key`.
    """
    flat: dict[Any, Any] = dict(traverse_util.flatten_dict(params))
    flat_specs: dict[Any, Any] = traverse_util.flatten_dict(specs)
    found: dict[Any, Any] = traverse_util.flatten_dict(variables.unbox(maxima))
    largest, clipped, heads = [], [], 0
    for path, maximum in found.items():
      if path[0] != variables.MAX_LOGITS:
        continue
      layer = ("params", *path[1:-2])
      share = self.threshold / jnp.maximum(maximum, self.threshold)
      for kernel, factor in _find_factors(layer, share, flat_specs):
        value = flat[kernel].astype(jnp.float32) * factor
        flat[kernel] = value.astype(flat[kernel].dtype)
      largest.append(jnp.max(maximum))
      clipped.append(jnp.sum(share < 1))
      heads += share.size
    if not largest:
      raise ValueError(
        "QkClip (Learner.after_update) needs the largest logits of attention"
        " layers: set max_logits=max_logits.MaxLogits() of"
        " GroupedQueryAttention, or unset Learner.after_update."
      )
    return traverse_util.unflatten_dict(flat), {
      "max_attention_logit": metrics_lib.scalar(jnp.max(jnp.stack(largest))),
      "clipped_heads": metrics_lib.scalar(jnp.sum(jnp.stack(clipped)) / heads),
    }


def _find_factors(
  layer: tuple[str, ...], share: jax.Array, specs: dict[Any, Any]
) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
  """Yields the parameters of queries and keys of a layer, and their factors.

  `share` is c_n, [*stacked, heads].
  """
  paths = {name: (*layer, name) for name in ("query", "key")}
  for name, path in paths.items():
    if path not in specs:
      raise ValueError(
        f"QkClip scales the kernels query and key, but"
        f" {'/'.join(layer)} has no {name}; use SeparateProjections."
      )
  spec = specs[paths["key"]]
  num_keys = spec.shape[spec.axes.index(axis_names.KV_HEADS)]
  grouped = share.reshape(*share.shape[:-1], num_keys, -1)
  root = jnp.sqrt(jnp.min(grouped, axis=-1, keepdims=True))
  factors = {
    ("query", axis_names.HEADS): (grouped / root).reshape(share.shape),
    ("key", axis_names.KV_HEADS): root[..., 0],
  }
  for (name, axis), factor in factors.items():
    for path in (paths[name], (*layer, f"{name}_bias")):
      spec = specs.get(path)
      if spec is not None:
        yield path, _spread(factor, spec, axis)


def _spread(
  factor: jax.Array, spec: variables.VariableSpec, axis: str
) -> jax.Array:
  """Returns factors [*stacked, heads] with the rank of a parameter."""
  depth = len(spec.stacked)
  index = spec.axes.index(axis)
  shape = [
    size if i < depth or i == index else 1 for i, size in enumerate(spec.shape)
  ]
  return factor.reshape(shape)
