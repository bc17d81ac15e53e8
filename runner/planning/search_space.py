"""Search space: the changes to try, and their overrides."""

from collections.abc import Iterator, Sequence
from typing import Final

import fiddle as fdl
import jax.numpy as jnp

from paxon.layers import remat
from paxon.runner import job as job_lib
from paxon.runner.configuration import text_values, tree
from paxon.runner.plan.search import candidates

_LEARNER: Final = "task.learner"
_MESH: Final = "mesh"
_POLICY: Final = "remat_policy"
_PARTS: Final = "num_microbatches"
_MOMENTUM: Final = "momentum_dtype"
_MAX_PARTS: Final = 64

_QKV: Final = (
  remat.ATTENTION_QUERY,
  remat.ATTENTION_KEY,
  remat.ATTENTION_VALUE,
)


def _save_only(*names: str) -> str:
  """The policy as it is typed, in quotes that a shell's may hold."""
  quoted = ", ".join(f'"{name}"' for name in names)
  return f"layers.remat.SaveOnly(({quoted},))"


# From what recomputes nothing to what saves nothing, as it is typed.
POLICIES: Final[tuple[tuple[str, str], ...]] = (
  ("None", "save everything"),
  (
    "layers.remat.save_projections",
    "recompute all but matmuls with weights",
  ),
  (
    _save_only(*_QKV, remat.ATTENTION_CONTEXT),
    "recompute all but the inputs and outputs of attention",
  ),
  (
    _save_only(remat.ATTENTION_CONTEXT),
    "recompute all but the outputs of attention",
  ),
  ("layers.remat.save_nothing", "recompute all but the layer inputs"),
)


def remat_choices(
  config: "fdl.Config[job_lib.Job]", *, only_thriftier: bool
) -> tuple[candidates.Choice, ...]:
  """Returns the other remat policies of all stacks together.

  Args:
    config: The root.
    only_thriftier: Leaves out those that save more than the one in use.
  """
  places = list(_places(config, _POLICY))
  if not places:
    return ()
  in_use = [tree.value_of(node, _POLICY) for _, node in places]
  known = [text_values.parse(text, remat.Policy | None) for text, _ in POLICIES]
  # Of one that is not in the list nobody knows what it saves.
  current = [i for i, policy in enumerate(known) if in_use.count(policy)]
  first = min(current) + 1 if current else 0
  return tuple(
    candidates.Choice(
      kind=candidates.Kind.REMAT,
      assignments=tuple(f"{path}={text}" for path, _ in places),
      words=words,
    )
    for i, (text, words) in enumerate(POLICIES)
    if (i >= first if only_thriftier else i not in current)
  )


def microbatch_choices(
  config: "fdl.Config[job_lib.Job]", *, rows: int
) -> tuple[candidates.Choice, ...]:
  """Returns multiples of the number of microbatches in use.

  Args:
    config: The root.
    rows: Of a global batch.
  """
  found = [(p, n) for p, n in _places(config, _PARTS) if p.startswith(_LEARNER)]
  if len(found) != 1:
    return ()
  ((path, node),) = found
  parts = 2 * tree.value_of(node, _PARTS)
  choices = []
  while parts <= min(rows, _MAX_PARTS):
    choices.append(
      candidates.Choice(
        kind=candidates.Kind.MICROBATCHES,
        assignments=(f"{path}={parts}",),
        words=f"compute a batch in {parts} microbatches",
      )
    )
    parts *= 2
  return tuple(choices)


def dtype_choices(
  config: "fdl.Config[job_lib.Job]",
) -> tuple[candidates.Choice, ...]:
  """Returns narrower dtypes for the state of the optimizers."""
  paths = [
    path
    for path, node in _places(config, _MOMENTUM)
    if jnp.dtype(tree.value_of(node, _MOMENTUM)).itemsize > 2
  ]
  if not paths:
    return ()
  return (
    candidates.Choice(
      kind=candidates.Kind.DTYPE,
      assignments=tuple(f"{path}=bfloat16" for path in paths),
      words="keep the optimizer's momentum in bfloat16 (which rounds it)",
    ),
  )


def mesh_choices(texts: Sequence[str]) -> tuple[candidates.Choice, ...]:
  """Returns one choice a mesh.

  Args:
    texts: Meshes as they are typed.
  """
  return tuple(
    candidates.Choice(
      kind=candidates.Kind.MESH,
      assignments=(f"{_MESH}={text}",),
      words=f"split over {text or 'nothing'}",
    )
    for text in texts
  )


def assigned(candidate: candidates.Candidate, kind: candidates.Kind) -> str:
  """Returns the value that a candidate's choice assigns; empty for none."""
  choice = candidate.of_kind(kind)
  return "" if choice is None else choice.assignments[0].partition("=")[2]


def _places(
  config: "fdl.Config[job_lib.Job]", field: str
) -> Iterator[tuple[str, fdl.Buildable]]:
  """Yields the path of each field with this name, and its node."""
  seen: set[int] = set()
  for path, node in tree.nodes(config):
    # A shared node is one place.
    if field in tree.field_names(node) and id(node) not in seen:
      seen.add(id(node))
      yield tree.join(path, field), node
