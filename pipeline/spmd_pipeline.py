"""A stack of layers whose parts are on several groups of devices.

`PipelinedStack` takes the place of `layers.stack.Stack`: it is called in the
same way, and has the same variables with the same names and shapes, so a
checkpoint does not know by which of them it was written. The rows of a batch
pass through the stages in microbatches (`timetable`, `shifting_buffer`); all
stages are one program, which computes every stage's part at once, by `vmap`
over an axis that the mesh axis `stage` shards.

What holds of everything that is no activation, of each layer: it begins with
the same values for every microbatch, and afterwards is what `collected` says.
Variables that are overwritten with their gradient are combined over
microbatches by their `CombineRule`. A bubble, which is a stage that computes
without having been given rows, changes nothing.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax

from paxon.layers import remat, shared, stack, stacked_cache
from paxon.pipeline import microbatch_rows, placement, stage_view, staged_run
from paxon.pipeline import timetable as timetable_lib
from paxon.sharding import axes, checks, variables

# Collections whose variables are neither replaced nor overwritten, and caches.
_PLAIN = {"params", shared.COLLECTION, stacked_cache.COLLECTION}


class PipelinedStack(stack.Stack):
  """A `Stack` in stages.

  The groups of layers (one period of `blocks` each) are given out to the stages
  in runs; where they do not divide, the last runs are shorter. Layers that do
  not fill a period are computed after the pipeline, on all devices.

  Attributes:
    num_stages: Into how many parts the layers are split; the size of the mesh
      axis `stage`.
    num_microbatches: Into how many microbatches a batch is cut, or
    microbatch_size: how many rows each has. One of the two.
    circular_repeats: How often a microbatch passes through the stages, each of
      which has that many runs of layers: shorter bubbles, more transfers.
    streaming: Whether microbatches are kept by the stages in turns instead of
      by all; their number must be a multiple of the stages'.
    iteration_policy: What a tick keeps for the backward pass besides what it is
      given (`layers.remat`); None keeps what the layers keep.
  """

  num_stages: int = 1
  num_microbatches: int | None = None
  microbatch_size: int | None = None
  circular_repeats: int = 1
  streaming: bool = False
  iteration_policy: remat.Policy | None = remat.save_nothing

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_stages", "circular_repeats")
    given = (self.num_microbatches, self.microbatch_size)
    if (given[0] is None) == (given[1] is None):
      raise ValueError(
        "PipelinedStack needs one of num_microbatches and microbatch_size, got"
        f" {given[0]} and {given[1]}."
      )
    for field in ("num_microbatches", "microbatch_size"):
      if getattr(self, field) is not None:
        checks.check_size(self, field)
    groups, parts = self.num_groups(), self.num_stages * self.circular_repeats
    if groups < parts:
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
        f" num_stages ({self.num_stages}) while streaming."
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
      x: What each layer maps to something of the same shape and dtype; its
        first axis is the batch.
      *args: Arrays (or trees of them) given to every layer. Those whose first
        axis has the size of the batch are cut into microbatches like `x`.
      layer_index: The number of this stack among those of an outer stack.
      **static: Keyword arguments for every layer, constants of the
        compilation such as `deterministic` and `cache_length`.

    Raises:
      ValueError: The batch cannot be cut into such microbatches, or the mesh
        has no such stages.
    """
    if self.is_initializing():
      # The variables are those of a stack, and so are their first values.
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
    """Returns `(block, x, index, *args) -> x`.

    Args:
      static: Keyword arguments of the layers.
    """
    return self._call(static, prevent_cse=False)

  def _settings(self, x: Any) -> staged_run.Settings:
    """Returns how the batch passes through the stages."""
    batch = jax.tree.leaves(x)[0].shape[0]
    placement.check_mesh(self.num_stages)
    # Prompts and samples are as many as there are.
    shrink = self.is_mutable_collection(stacked_cache.COLLECTION)
    number = microbatch_rows.number(
      batch,
      num_microbatches=self.num_microbatches,
      microbatch_size=self.microbatch_size,
      shards=placement.row_shards(),
      shrink=shrink,
    )
    self._check_rows(batch, number)
    streaming = self.streaming
    if streaming and number % self.num_stages:
      if shrink or self.num_microbatches is not None:
        streaming = False
      else:
        raise ValueError(
          f"PipelinedStack.microbatch_size ({self.microbatch_size}) cuts the"
          f" {batch} rows of the batch into {number} microbatches; while"
          f" streaming their number must be a multiple of num_stages"
          f" ({self.num_stages})."
        )
    return staged_run.Settings(
      rows=microbatch_rows.Rows(
        num_microbatches=number,
        num_runs=self.num_stages if streaming else 1,
      ),
      view=stage_view.StageView(
        num_groups=self.num_groups(),
        num_stages=self.num_stages,
        num_repeats=self.circular_repeats,
      ),
      table=timetable_lib.Timetable(
        num_stages=self.num_stages,
        num_microbatches=number,
        num_repeats=self.circular_repeats,
      ),
      period=len(self.blocks),
      batch=batch,
      streaming=streaming,
      unroll=not self.scan,
      iteration_policy=self.iteration_policy,
    )

  def _check_rows(self, batch: int, number: int) -> None:
    """Raises ValueError where the mesh cannot share out a microbatch."""
    shards, rows = placement.row_shards(), batch // number
    # As layers do, a microbatch of one row stays whole.
    if rows > 1 and rows % shards:
      raise ValueError(
        f"PipelinedStack: num_microbatches={number} leaves {rows} rows of the"
        f" {batch} to a microbatch, which do not divide by the {shards} shards"
        " of the batch on this mesh; change either."
      )

  def _specs(
    self, x: Any, args: tuple[Any, ...], static: dict[str, Any]
  ) -> variables.Specs:
    """Returns the specs of the stacked variables that steps change."""
    own = {name for name, tree in self.variables.items() if axes.LAYERS in tree}
    if own <= _PLAIN:
      return {}
    # State is plain arrays; what becomes of them, an abstract init tells.
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
      for name, tree in variables.specs_of(abstract).items()
      if name not in _PLAIN and axes.LAYERS in tree
    }
