"""Search space: the layouts that a job can have, and how each is typed.

A candidate is a layout for the analytical estimate with the overrides that
select it, so that whatever is proposed can be pasted, and is compiled as the
user's next command will be. Fields are found by name, in any module:
`remat_policy`, `num_microbatches` of the learner, and `kernel` of attention
layers.
"""

from collections.abc import Iterator, Sequence
import copy
import dataclasses
import itertools
import json
from typing import Any, Final

import fiddle as fdl
import jax

from paxon.layers import remat
from paxon.layers.attention import kernel_support
from paxon.learners import learner as learner_lib
from paxon.learners import train_state
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.configuration import (
  overrides,
  resolving,
  text_values,
  tree,
)
from paxon.runner.plan import hardware, layouts, topology
from paxon.runner.planning import mesh_factors
from paxon.runner.planning import subject as subject_lib
from paxon.runner.session import kernel_checks
from paxon.runner.settings import compiler
from paxon.sharding import axes, rule_sets
from paxon.sharding import mesh as mesh_lib

_LEARNER: Final = "task.learner"
_MAX_MICROBATCHES: Final = 64
# Rule sets that a search tries where the mesh splits `tensor`.
_RULES: Final = ("2d", "megatron_sequence")
# Share of the memory from which a state may be offloaded.
_MUCH: Final = 0.5
# Set of compiler options that overlap collectives.
_OVERLAP: Final = "async_collectives"

_QKV: Final = (
  remat.ATTENTION_QUERY,
  remat.ATTENTION_KEY,
  remat.ATTENTION_VALUE,
)


def _save_only(*names: str) -> str:
  """The policy as it is typed, in quotes that a shell's may hold."""
  quoted = ", ".join(f'"{name}"' for name in names)
  return f"layers.remat.SaveOnly(({quoted},))"


# XLA's option and its pass that recomputes values to save memory.
_DISABLED_PASSES: Final = "xla_disable_hlo_passes"
_XLA_REMAT: Final = "rematerialization"

# From the policy that recomputes least to the one that saves least.
POLICIES: Final = (
  (layouts.Remat.ALL, "None", "save everything"),
  (
    layouts.Remat.PROJECTIONS_AND_RESIDUALS,
    "layers.remat.save_projections_and_attention",
    "recompute all but matmuls with weights and the attention kernel",
  ),
  (
    layouts.Remat.PROJECTIONS,
    "layers.remat.save_projections",
    "recompute all but matmuls with weights",
  ),
  (
    layouts.Remat.INPUTS_AND_RESIDUALS,
    _save_only(*_QKV, remat.ATTENTION_RESIDUALS),
    "recompute all but the inputs of attention and its kernel",
  ),
  (
    layouts.Remat.ATTENTION,
    _save_only(*_QKV, remat.ATTENTION_CONTEXT),
    "recompute all but the inputs and outputs of attention",
  ),
  (
    layouts.Remat.CONTEXT,
    _save_only(remat.ATTENTION_CONTEXT),
    "recompute all but the outputs of attention",
  ),
  (
    layouts.Remat.RESIDUALS,
    _save_only(remat.ATTENTION_RESIDUALS),
    "recompute all but the attention kernel",
  ),
  (
    layouts.Remat.NOTHING,
    "layers.remat.save_nothing",
    "recompute all but the layer inputs",
  ),
)

_OF_FUSED_KERNELS: Final = (
  layouts.Remat.INPUTS_AND_RESIDUALS,
  layouts.Remat.PROJECTIONS_AND_RESIDUALS,
  layouts.Remat.RESIDUALS,
)

# Fused kernels, as they are typed.
_FUSED: Final = (
  (kernel_support.CUDNN, "layers.attention.cudnn_attention.cudnn", "cuDNN"),
  (
    kernel_support.SPLASH,
    "layers.attention.splash.Splash()",
    "splash attention",
  ),
)
_CAUSAL: Final = (
  kernel_support.CUDNN_ONE_DOCUMENT.name,
  kernel_support.SPLASH.name,
)
_PLAIN: Final = (kernel_support.PLAIN.name, kernel_support.AUTO.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """One value of one dimension of the search.

  Attributes:
    assignments: `path=value` of the overrides; empty for the value in use.
    words: The change, for a reader.
    fields: Fields of `layouts.Layout`.
  """

  assignments: tuple[str, ...] = ()
  words: str = ""
  fields: tuple[tuple[str, object], ...] = ()


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A layout and the changes of the job that select it.

  Attributes:
    layout: For the analytical estimate.
    changes: Choices that differ from the job.
  """

  layout: layouts.Layout
  changes: tuple[Choice, ...] = ()

  @property
  def overrides(self) -> tuple[overrides.Override, ...]:
    """Overrides to append to those of the command line."""
    pairs = (a.partition("=") for c in self.changes for a in c.assignments)
    return tuple(overrides.Override(path, text) for path, _, text in pairs)

  @property
  def words(self) -> str:
    """The changes, for a reader."""
    words = [change.words for change in self.changes] or ["change nothing"]
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]


class Space:
  """All candidates of one job on one target."""

  def __init__(
    self, subject: subject_lib.Subject, *, work: layouts.Work | None = None
  ) -> None:
    """Reads a job.

    Args:
      subject: The job, whose mesh may be `auto`.
      work: FLOPs of a step, if known.
    """
    self._config, self._job = config, job = subject.config, subject.job
    self._target, shapes = subject.target, subject.shapes
    self._subject = subject
    state = train_state.state_specs(shapes.specs, learner=job.task.learner)
    self.layouts = layouts.Layouts(
      specs=jax.tree.leaves(shapes.specs),
      state=jax.tree.leaves(state),
      optimizer=(s for s in jax.tree.leaves(state.opt_state) if s.shape),
      choices=_count_choices(config),
      batch={name: shape for name, (shape, _) in shapes.batch.items()},
      rules=job.rules,
      target=self._target,
      work=work,
    )
    self.current = Candidate(
      layouts.Layout(
        mesh="" if job.mesh == mesh_lib.AUTO else job.mesh,
        remat=_current_remat(config),
        microbatches=job.task.learner.num_microbatches,
        attention=_current_attention(config),
        is_exchanged=any(
          tree.get_value(node, "dispatch").bound is not None
          for _, node in _gathering(config, is_bounded=True)
        ),
        is_offloaded=job.task.learner.offload_state,
      )
    )

  def candidates(self, *, only_meshes: bool = False) -> list[Candidate]:
    """Returns the candidates whose sizes divide and whose state fits.

    Args:
      only_meshes: Whether nothing but the mesh changes.
    """
    unchanged = (Choice(),)
    remats = kernels = microbatches = rules = dispatches = unchanged
    offloads = unchanged
    if not only_meshes:
      remats += remat_choices(self._config)
      microbatches += microbatch_choices(
        self._config, batch_size=self._job.train_input.global_batch_size
      )
      kernels = self._kernels()
      rules += self._rules()
      dispatches += exchange_choices(self._config)
      offloads += self._offloads()
    found = []
    for mesh in self._meshes():
      text = self._make((mesh,)).layout.mesh
      # Sets of rules differ in activations over `tensor`, dispatches over
      # `expert`.
      varied = itertools.product(
        kernels,
        remats,
        microbatches,
        rules if axes.TENSOR in text else unchanged,
        dispatches if axes.EXPERT in text else unchanged,
        offloads,
      )
      for choices in varied:
        candidate = self._make((*((mesh,) if mesh.fields else ()), *choices))
        if self._is_possible(candidate.layout):
          found.append(candidate)
    return found

  def _is_possible(self, layout: layouts.Layout) -> bool:
    """Whether sizes divide, kernels exist and the state fits."""
    is_plain = layout.attention is layouts.Attention.PLAIN
    is_changed = layout.attention is not self.current.layout.attention
    if is_changed and axes.SEQUENCE in layout.mesh:
      return False  # Fused kernels need whole sequences.
    if is_plain and layout.remat in _OF_FUSED_KERNELS:
      return False
    if not self.layouts.is_possible(
      layout.mesh, microbatches=layout.microbatches, rules=layout.rules
    ):
      return False
    usable = self._target.hardware.usable_bytes
    if usable is None:
      return True
    state = self.layouts.state_bytes(layout.mesh, layout.rules)
    if layout.is_offloaded and not self.current.layout.is_offloaded:
      # Copies take time, so only where the state takes much of the memory.
      if state < _MUCH * usable:
        return False
      state -= self.layouts.optimizer_bytes(layout.mesh, layout.rules)
    return state <= usable

  def keep_from_recomputing(self, candidate: Candidate) -> Candidate | None:
    """Returns a candidate for which XLA does not recompute to save memory.

    Args:
      candidate: Any candidate.

    Returns:
      The candidate with one more change; None if the compiler has no such
      option, or the job sets it.
    """
    given = self._job.compiler_options
    platform = self._target.hardware.platform
    if platform is not hardware.Platform.CUDA or _DISABLED_PASSES in given:
      return None
    options = json.dumps({**given, _DISABLED_PASSES: _XLA_REMAT})
    choice = Choice(
      assignments=(f"compiler_options={options}",),
      words="keep the compiler from recomputing",
    )
    return Candidate(candidate.layout, (*candidate.changes, choice))

  def overlap(self, candidate: Candidate) -> Candidate | None:
    """Returns a candidate whose compiler overlaps more collectives, or None.

    Args:
      candidate: Any candidate.
    """
    kind, name = self._target.hardware.name, _OVERLAP
    if name in self._job.compiler_option_sets or not any(
      each.name == name and kind in each.hardware for each in compiler.SETS
    ):
      return None
    names = (*self._job.compiler_option_sets, name)
    choice = Choice(
      assignments=(f"compiler_option_sets={names!r}",),
      words="overlap more collectives",
    )
    return Candidate(candidate.layout, (*candidate.changes, choice))

  def _rules(self) -> tuple[Choice, ...]:
    """The sets of rules that change activations between layers."""
    choices = []
    for name in _RULES:
      choice = Choice(
        assignments=(f"rules={name}",),
        words=f"use the rules {name}",
        fields=(("rules", name),),
      )
      found = rule_sets.find_rules(name)
      is_default = self._job.rules == rule_sets.find_rules(rule_sets.DEFAULT)
      is_typed = is_default or self._job.rules in map(
        rule_sets.find_rules, _RULES
      )
      if found != self._job.rules and is_typed and self._is_typed(choice):
        choices.append(choice)
    return tuple(choices)

  def _is_typed(self, choice: Choice) -> bool:
    """Whether the experiment has a knob for it."""
    more = Candidate(self.current.layout, (choice,)).overrides
    given = subject_lib.merge(self._subject.overrides, more)
    try:
      resolving.resolve(self._subject.experiment, given)
    except user_error.UserError:
      return False
    return True

  def _offloads(self) -> tuple[Choice, ...]:
    """Optimizer state in host memory, where it can be."""
    learner = self._job.task.learner
    platform = self._target.hardware.platform
    is_single = isinstance(learner, learner_lib.Learner)
    if (
      not is_single
      or learner.offload_state
      or platform is hardware.Platform.CPU
    ):
      return ()
    return (
      Choice(
        assignments=(f"{_LEARNER}.offload_state=True",),
        words="keep the optimizer state in host memory",
        fields=(("is_offloaded", True),),
      ),
    )

  def _make(self, choices: Sequence[Choice]) -> Candidate:
    fields: dict[str, Any] = dict(
      pair for choice in choices for pair in choice.fields
    )
    layout = dataclasses.replace(self.current.layout, **fields)
    return Candidate(layout, tuple(c for c in choices if c.assignments))

  def _meshes(self) -> Iterator[Choice]:
    """Yields the mesh in use, and the others."""
    number = self._target.num_devices
    text = self.current.layout.mesh
    current = mesh_lib.MeshSpec.parse(text or "data=-1")
    varied = list(self.layouts.usable_axes)
    if not self._allows_split_sequences() and axes.SEQUENCE in varied:
      varied.remove(axes.SEQUENCE)
    if text:
      yield Choice()
    for spec in mesh_factors.meshes(
      current,
      target=self._target,
      varied=varied,
      kept_axes=self.layouts.working_axes,
    ):
      if not text or spec.resolve(number) != current.resolve(number):
        yield Choice(
          assignments=(f"mesh={spec}",),
          words=f"split over {spec}" if str(spec) else "do not split",
          fields=(("mesh", str(spec)),),
        )

  def _allows_split_sequences(self) -> bool:
    return not self._has_problem(self._job, length_shards=2)

  def _has_problem(self, job: job_lib.Job, *, length_shards: int = 1) -> bool:
    try:
      kernel_checks.check_attention(
        job,
        platform=self._target.hardware.platform.value,
        length_shards=length_shards,
      )
    except user_error.UserError:
      return True
    return False

  def _kernels(self) -> tuple[Choice, ...]:
    """The kernel in use and the platform's fused kernel, where supported."""
    found = [] if self._has_problem(self._job) else [Choice()]
    platform = self._target.hardware.platform.value
    for support, text, words in _FUSED:
      if platform not in support.platforms or (
        support is kernel_support.CUDNN and topology.missing_for_cudnn()
      ):
        continue
      paths = [
        path
        for path, kernel in _attention_kernels(self._config)
        if platform not in kernel.platforms
      ]
      choice = Choice(
        assignments=tuple(f"{path}={text}" for path in paths),
        words=f"compute attention by {words}",
        fields=(("attention", _find_kind(support)),),
      )
      if paths and not self._has_problem(_with(self._config, choice)):
        found.append(choice)
    return tuple(found) or (Choice(),)


def remat_choices(config: "fdl.Config[job_lib.Job]") -> tuple[Choice, ...]:
  """Returns the other remat policies of all stacks together.

  Args:
    config: The root.
  """
  places = list(_places(config, "remat_policy"))
  in_use = [tree.get_value(node, "remat_policy") for _, node in places]
  return tuple(
    Choice(
      assignments=tuple(f"{path}={text}" for path, _ in places),
      words=words,
      fields=(("remat", level),),
    )
    for level, text, words in POLICIES
    if places and not in_use.count(_parse_policy(text))
  )


def microbatch_choices(
  config: "fdl.Config[job_lib.Job]", *, batch_size: int
) -> tuple[Choice, ...]:
  """Returns powers of two times the number of microbatches in use.

  Args:
    config: The root.
    batch_size: Sequences of a global batch.
  """
  name = "num_microbatches"
  places = [p for p in _places(config, name) if p[0].startswith(_LEARNER)]
  # A pipeline schedule accumulates gradients itself.
  is_scheduled = any(
    hasattr(fdl.get_callable(node), "make_gradient_fn")
    for path, node in tree.nodes(config)
    if not path.startswith(_LEARNER)
  )
  if len(places) != 1 or is_scheduled:
    return ()
  ((path, node),) = places
  number = 2 * tree.get_value(node, name)
  choices = []
  while number <= min(batch_size, _MAX_MICROBATCHES):
    choices.append(
      Choice(
        assignments=(f"{path}={number}",),
        words=f"compute a batch in {number} microbatches",
        fields=(("microbatches", number),),
      )
    )
    number *= 2
  return tuple(choices)


def exchange_choices(
  config: "fdl.Config[job_lib.Job]",
) -> tuple[Choice, ...]:
  """Returns the exchange of tokens by all-to-all, instead of gathering them.

  Args:
    config: The root.
  """
  paths = [path for path, _ in _gathering(config)]
  if not paths:
    return ()
  value = f"layers.moe.dispatch.Dropless(bound={layouts.BOUND})"
  return (
    Choice(
      assignments=tuple(f"{path}={value}" for path in paths),
      words="send tokens to their experts by all-to-all",
      fields=(("is_exchanged", True),),
    ),
  )


def _gathering(
  config: "fdl.Config[job_lib.Job]", *, is_bounded: bool = False
) -> Iterator[tuple[str, fdl.Buildable]]:
  """Yields mixtures whose dispatch has a bound, or only lacks one."""
  for path, node in _places(config, "dispatch"):
    found = tree.get_value(node, "dispatch")
    # By name, as all fields here: a search imports no layers of mixtures.
    if type(found).__name__ == "Dropless":
      is_default = found == type(found)()
      if found.bound is not None if is_bounded else is_default:
        yield path, node


def _count_choices(config: "fdl.Config[job_lib.Job]") -> int:
  """Returns the experts of a token."""
  found = [
    getattr(tree.get_value(node, "router"), "k", None)
    for _, node in _places(config, "router")
  ]
  return max((k for k in found if isinstance(k, int)), default=2)


def loss_chunk(config: "fdl.Config[job_lib.Job]") -> int:
  """Returns the tokens of a chunk of the loss; 0 for all.

  Args:
    config: The root.
  """
  found = [
    tree.get_value(node, "chunk_length")
    for path, node in _places(config, "chunk_length")
    if "loss" in path
  ]
  return max((n for n in found if n), default=0)


def _current_remat(config: "fdl.Config[job_lib.Job]") -> layouts.Remat:
  for _, node in _places(config, "remat_policy"):
    policy = tree.get_value(node, "remat_policy")
    for level, text, _ in POLICIES:
      if _parse_policy(text) == policy:
        return level
    # An unknown policy: a guess between the extremes.
    return layouts.Remat.ATTENTION
  return layouts.Remat.ALL


def _current_attention(config: "fdl.Config[job_lib.Job]") -> layouts.Attention:
  kinds = [_find_kind(kernel) for _, kernel in _attention_kernels(config)]
  order = list(layouts.Attention)
  return min(kinds, key=order.index, default=layouts.Attention.PLAIN)


def _find_kind(support: kernel_support.Support) -> layouts.Attention:
  if support.name in _CAUSAL:
    return layouts.Attention.CAUSAL
  # Kernels that declare nothing are taken for plain ones.
  return (
    layouts.Attention.PLAIN
    if support.name in _PLAIN
    else layouts.Attention.FUSED
  )


def _attention_kernels(
  config: "fdl.Config[job_lib.Job]",
) -> Iterator[tuple[str, kernel_support.Support]]:
  """Yields the path of each layer's kernel, and what it supports."""
  for path, node in _places(config, "kernel"):
    if "num_heads" in tree.field_names(node):
      kernel = tree.get_value(node, "kernel")
      yield path, kernel_support.find_support(kernel) or kernel_support.PLAIN


def _parse_policy(text: str) -> object:
  return text_values.parse(text, remat.Policy | None)


def _with(config: "fdl.Config[job_lib.Job]", choice: Choice) -> job_lib.Job:
  changed = copy.deepcopy(config)
  for override in Candidate(layouts.Layout(mesh=""), (choice,)).overrides:
    overrides.apply(changed, override)
  return resolving.build(changed)


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
