"""Pipeline parallelism by SPMD: a stack of layers split into stages.

`PipelinedStack` replaces `layers.stacks.stack.Stack`: it has the same call and
the same variables with the same names and shapes, so checkpoints are
interchangeable. A batch passes through the stages in microbatches (`stages`,
`shifting_buffer`). One program computes all stages at once, by `vmap` over an
axis that is sharded over the mesh axis `stage`.

State other than activations (caches, replaced variables, sown values) has the
same value at the beginning of every microbatch and is combined afterwards
(`layer_state`). Variables that are overwritten with their gradient are combined
over microbatches by their `CombineRule`. A bubble, in which a stage computes on
no microbatch, changes nothing.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax

from paxon.layers import remat
from paxon.layers.stacks import shared, stack, stacked_cache
from paxon.pipeline import stage_sharding, staged_run, stages
from paxon.sharding import axes, checks, variables

# Collections whose variables are neither replaced nor overwritten, and caches.
_PLAIN = {"params", shared.COLLECTION, stacked_cache.COLLECTION}


class PipelinedStack(stack.Stack):
  """A `Stack` split into stages.

  Each stage has consecutive groups of layers (one period of `blocks` each); if
  they do not divide, the last stages have fewer. Layers that do not fill a
  period are computed after the pipeline, on all devices.

  Attributes:
    num_stages: Number of stages; the size of the mesh axis `stage`.
    num_microbatches: Number of microbatches of a batch, or None.
    microbatch_size: Sequences of a microbatch, or None. Exactly one of the two
      must be set.
    circular_repeats: How often a microbatch passes through all stages, each of
      which has that many chunks of layers: shorter bubbles, more transfers.
    streaming: Whether each stage holds a share of the microbatches, instead of
      all; their number must be a multiple of the stages.
    iteration_policy: Values that a tick saves besides its inputs
      (`layers.remat`); None saves what the layers save.
  """

  num_stages: int = 1
  num_microbatches: int | None = None
  microbatch_size: int | None = None
  circular_repeats: int = 1
  streaming: bool = False
  iteration_policy: remat.Policy | str | None = remat.save_nothing

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_stages", "circular_repeats")
    given = (self.num_microbatches, self.microbatch_size)
    if (given[0] is None) == (given[1] is None):
      raise ValueError(
        "PipelinedStack needs exactly one of num_microbatches and"
        f" microbatch_size, got {given[0]} and {given[1]}."
      )
    checks.check_size(self, "num_microbatches", "microbatch_size")
    if self.num_groups() < self.num_stages * self.circular_repeats:
      repeats = self.circular_repeats
      times = f" times circular_repeats ({repeats})" if repeats > 1 else ""
      period = len(self.blocks)
      of = f" in groups of {period} blocks" if period > 1 else ""
      raise ValueError(
        f"PipelinedStack.num_stages ({self.num_stages}){times} must be at most"
        f" the number of layers{of}, got num_layers={self.num_layers}."
      )
    number = self.num_microbatches
    if self.streaming and number is not None and number % self.num_stages:
      raise ValueError(
        f"PipelinedStack.num_microbatches ({number}) must be a multiple of"
        f" num_stages ({self.num_stages}) with streaming=True."
      )

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    *args: Any,
    layer_index: jax.Array | None = None,
    **static: Any,
  ) -> Any:
    """Returns `x` after all layers.

    Args:
      x: Input of the first layer, [batch,...]; layers keep shape and dtype.
      *args: Arrays (or trees of them) passed to every layer. Those whose first
        axis has the size of the batch are split into microbatches like `x`.
      layer_index: Index of this stack in an outer stack.
      **static: Keyword arguments for every layer, constants of the
        compilation such as `deterministic` and `cache_length`.

    Raises:
      ValueError: The batch does not divide into the microbatches, or the mesh
        does not have the stages.
    """
    if self.is_initializing() or not self._num_stacked():
      # Variables and initial values are those of a plain stack.
      return super().__call__(x, *args, layer_index=layer_index, **static)
    indices = self._indices(layer_index)
    groups, period = self.num_groups(), len(self.blocks)
    x = staged_run.run(
      self,
      x,
      args,
      starts=None if indices is None else indices[: groups * period : period],
      call=self.layer_call(static),
      specs=self._specs(x, args, static),
      settings=self._settings(x),
    )
    call = self._call(static, prevent_cse=True)
    for i in range(groups * period, self.num_layers):
      block = shared.with_stores(self.blocks[i % period], owner=self)
      layer = block.clone(parent=self, name=f"layers_{i}")
      x = call(layer, x, None if indices is None else indices[i], *args)
    return x

  def num_groups(self) -> int:
    """Returns the number of whole periods of `blocks`."""
    return self.num_layers // len(self.blocks)

  def layer_call(self, static: dict[str, Any]) -> Callable[..., Any]:
    """Returns `(block, x, index, *args) -> x`."""
    return self._call(static, prevent_cse=False)

  def _settings(self, x: Any) -> staged_run.Settings:
    """Returns how the batch passes through the stages."""
    batch = jax.tree.leaves(x)[0].shape[0]
    stage_sharding.check_mesh(self.num_stages)
    # Decoding accepts any number of prompts and samples.
    shrink = self.is_mutable_collection(stacked_cache.COLLECTION)
    number = stages.count_microbatches(
      batch,
      num_microbatches=self.num_microbatches,
      microbatch_size=self.microbatch_size,
      shards=stage_sharding.count_microbatch_shards(),
      shrink=shrink,
    )
    self._check_size(batch, number)
    streaming = self.streaming
    if streaming and number % self.num_stages:
      if shrink or self.num_microbatches is not None:
        streaming = False
      else:
        raise ValueError(
          f"PipelinedStack.microbatch_size ({self.microbatch_size}) splits the"
          f" batch of {batch} sequences into {number} microbatches; with"
          " streaming=True their number must be a multiple of num_stages"
          f" ({self.num_stages})."
        )
    return staged_run.Settings(
      microbatches=stages.Microbatches(
        num_microbatches=number,
        num_segments=self.num_stages if streaming else 1,
      ),
      layers=stages.StageLayers(
        num_groups=self.num_groups(),
        num_stages=self.num_stages,
        num_repeats=self.circular_repeats,
      ),
      ticks=stages.Ticks(
        num_stages=self.num_stages,
        num_microbatches=number,
        num_repeats=self.circular_repeats,
      ),
      period=len(self.blocks),
      batch=batch,
      streaming=streaming,
      unroll=not self.scan,
      iteration_policy=remat.to_policy(self.iteration_policy),
    )

  def _check_size(self, batch: int, number: int) -> None:
    """Raises ValueError if the mesh cannot shard a microbatch evenly."""
    shards, size = stage_sharding.count_microbatch_shards(), batch // number
    # As in layers, a microbatch of one sequence is not sharded.
    if size > 1 and size % shards:
      raise ValueError(
        f"PipelinedStack: {number} microbatches of a batch of {batch} have"
        f" {size} sequences each, which must be a multiple of the {shards}"
        " shards of the batch on this mesh; change either."
      )

  def _specs(
    self, x: Any, args: tuple[Any, ...], static: dict[str, Any]
  ) -> variables.Specs:
    """Returns the specs of the stacked variables that a step changes."""
    own = {name for name, tree in self.variables.items() if axes.LAYERS in tree}
    if own <= _PLAIN:
      return {}
    # State is plain arrays; an abstract init has their specs.
    blank = stack.Stack(
      tuple(block.copy(parent=None, name=None) for block in self.blocks),
      num_layers=self.num_layers,
      pass_layer_index=self.pass_layer_index,
      parent=None,
    )
    key = jax.random.key(0)
    abstract = jax.eval_shape(
      lambda x, *args: blank.init(key, x, *args, **static), x, *args
    )
    return {
      name: tree[axes.LAYERS]
      for name, tree in variables.get_specs(abstract).items()
      if name not in _PLAIN and axes.LAYERS in tree
    }
