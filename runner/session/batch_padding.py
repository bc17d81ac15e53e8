"""Batches whose size the mesh does not divide, padded with empty examples.

An empty example is zero everywhere. Its weight is zero, so it changes neither
losses nor metrics nor gradients; inputs pad their last batch in the same way.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from flax import linen as nn
import numpy as np

from paxon.inputs import base_input
from paxon.layers.norms import batch_norm
from paxon.layers.stacks import shared
from paxon.learners import variable_groups
from paxon.runner import job as job_lib
from paxon.sharding import lint, rules

# Arrays of a batch of which zeros mean that there is no example.
_WEIGHTS: Final = frozenset(("weights", "example_weights", "is_example"))
# Zeros of it are tokens that reach no expert.
_SEGMENTS: Final = "segment_ids"


def pad(batch: Mapping[str, np.ndarray], shards: int) -> base_input.Batch:
  """Returns arrays [B,...] with empty examples up to a multiple of `shards`."""
  padded = {}
  for name, value in batch.items():
    count = rules.round_up(len(value), shards) - len(value)
    empty = np.zeros((count, *value.shape[1:]), value.dtype)
    padded[name] = np.concatenate([value, empty]) if count else value
  return padded


def pad_shapes(shapes: base_input.Shapes, shards: int) -> base_input.Shapes:
  """Returns the shapes of the arrays that `pad` returns."""
  return {
    name: ((rules.round_up(shape[0], shards), *shape[1:]), dtype)
    for name, (shape, dtype) in shapes.items()
  }


def find_obstacle(names: Collection[str]) -> str | None:
  """Returns why batches with these arrays cannot be padded, or None."""
  if _WEIGHTS.isdisjoint(names):
    return f"its batches have none of {', '.join(sorted(_WEIGHTS))}"
  return None


def find_training_obstacle(
  job: job_lib.Job, specs: variable_groups.Specs, names: Collection[str]
) -> str | None:
  """Returns why empty examples would change a training, or None.

  Args:
    job: The job.
    specs: Variables of its model.
    names: Arrays of its batches.
  """
  learner = job.task.learner
  if learner.num_microbatches > 1:
    return f"num_microbatches is {learner.num_microbatches}"
  if learner.privacy is not None:
    return "Learner.privacy counts the examples"
  if job.task.reward is not None:
    return "Task.reward rates each example"
  if batch_norm.COLLECTION in specs:
    return "the model has batch norms, whose statistics count the examples"
  return find_expert_obstacle(job.task.model, specs, names)


def find_expert_obstacle(
  model: nn.Module, specs: variable_groups.Specs, names: Collection[str]
) -> str | None:
  """Returns why empty examples change what experts compute, or None."""
  # Imported only for batches with padding.
  from paxon.layers.moe import balance, mixture, routing

  mixtures = [
    module
    for module in _iterate_modules(model)
    if isinstance(module, mixture.MixtureOfExperts)
  ]
  parts = [p for m in mixtures for p in (m.router, m.dispatch, *m.losses)]
  if any(
    isinstance(getattr(part, "groups", None), routing.TokenGroups)
    for part in parts
  ):
    return "the capacity or balance of experts counts the tokens of a batch"
  is_balanced = balance.COLLECTION in specs or any(m.losses for m in mixtures)
  if is_balanced and _SEGMENTS not in names:
    return f"the balance of experts counts examples without {_SEGMENTS}"
  return None


def _iterate_modules(module: nn.Module) -> Iterator[nn.Module]:
  yield module
  for _, inner in shared.iterate_submodules(module):
    yield from _iterate_modules(inner)


def find_padding(size: int, shards: int) -> list[lint.Finding]:
  """Returns the finding of the sharding lint if batches are padded."""
  whole = rules.round_up(size, shards)
  if whole == size:
    return []
  share = 1 - size / whole
  if share >= rules.IDLE_HALF:
    message = (
      f"batches of {size} examples do not cover the {shards} parts into which"
      f" the mesh splits them; make global_batch_size at least {shards}"
    )
    return [lint.Finding(lint.Rule.DOES_NOT_DIVIDE, True, message)]
  message = (
    f"batches of {size} examples are padded to {whole}, which the mesh splits"
    f" into {shards} parts: {100 * share:.2g} % of the work is padding;"
    f" global_batch_size={whole} costs no more time"
  )
  return [lint.Finding(lint.Rule.PADDED, False, message, share)]
