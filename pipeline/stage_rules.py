"""Sharding rules for models whose stack is in stages.

A stack stores its layers in their order, [layers,...]. Where a stage has one
run of layers, and all runs are equally long, that axis is split over the stages
and nothing moves before a step. With circular repeats, or runs that differ, no
sharding of that axis fits; then the width of weights (`embed`) is split over
the stages, too, and each step sends the weights to their stage and the
gradients back, once each, by all-to-all.

While streaming, batches are split over the stages outside of the pipeline, so
that embedding and head are computed once and not by each stage.
"""

from paxon.sharding import axes
from paxon.sharding import rules as rules_lib


def with_stages(
  rules: rules_lib.Rules,
  *,
  num_stages: int,
  num_groups: int,
  circular_repeats: int = 1,
  streaming: bool = False,
) -> rules_lib.Rules:
  """Returns rules that split a model over stages, too.

  Args:
    rules: What the other axes of the mesh split.
    num_stages: Of the `PipelinedStack`.
    num_groups: Its layers by the length of its pattern, rounded down.
    circular_repeats: Of the `PipelinedStack`.
    streaming: Of the `PipelinedStack`.

  Raises:
    ValueError: There are no stages.
  """
  if num_stages <= 0:
    raise ValueError(f"num_stages must be positive, got {num_stages}.")
  entries = dict(rules)
  changes: dict[str, rules_lib.MeshAxes] = {axes.STAGES: axes.STAGE}
  if circular_repeats == 1 and num_groups % num_stages == 0:
    changes[axes.LAYERS] = axes.STAGE
  else:
    width = rules_lib.as_tuple(entries.get(axes.EMBED))
    changes[axes.EMBED] = (*width, axes.STAGE)
  if streaming:
    batch = rules_lib.as_tuple(entries.get(axes.BATCH))
    changes[axes.BATCH] = (axes.STAGE, *batch)
  return rules_lib.replace(rules, changes)
