"""One program for all stages that runs a table and returns gradients.

  each stage, at each tick, for each slot of the tick:
    branch on the kind of operation, which reads buffers and writes none
    after the model's last chunk: head and loss, and the output's gradient
    put a result for the same stage into the mailbox
  send the result of each slot to the neighbors
  put what arrived where the table says

Gradients come from the table's own backward operations. Do not differentiate
through the program: autodiff would save every tick.

Collectives over stages are outside the branches, where all stages meet; inside
a branch they would wait for stages that run another branch. For the same reason
a chunk must not permute over any mesh axis (as ring attention does); sums and
gathers over other axes are allowed. Buffers are read inside branches and
written outside, because a branch that changes a buffer copies it.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from paxon.learners import metrics as metrics_lib
from paxon.pipeline.schedules import (
  chunk_gradients,
  lowering,
  model_functions,
  table,
)
from paxon.sharding import axes

_Spec = jax.sharding.PartitionSpec
_Tree = model_functions.Tree
_Kind = table.Kind
_COLUMN = {name: n for n, name in enumerate(lowering.COLUMNS)}


def make_gradient_fn(
  functions: model_functions.ModelFunctions,
  *,
  schedule: table.Table,
  maxima: Sequence[str] = (),
  residuals: lowering.Residuals = lowering.Residuals.RECOMPUTE,
  pin: Callable[[_Tree], _Tree] = lambda gradients: gradients,
) -> model_functions.GradientFn:
  """Returns `(chunks, outer, batch) -> Gradients`.

  `chunks` is a tree of arrays [K,...], one entry for each virtual stage in the
  model's order (`model_functions.split_layers`), best sharded over the mesh
  axis `stage`. `outer` has the variables of `first` and `last`, tied ones once.
  `batch` has arrays [M,size,...], random keys included. Call it under
  `jax.jit`, in the context of a mesh (`jax.set_mesh`) whose axis `stage` has
  the size of the table's stages. Other mesh axes are left to the partitioner.

  Args:
    functions: The model.
    schedule: The table.
    maxima: Keys of `chunks` and `outer`, which are dicts then, whose gradients
      are non-negative values, such as the amax of fp8: the maximum over
      microbatches is returned, not the sum.
    residuals: Values that forward operations save for backward operations.
    pin: Shards gradients of a chunk [...], sums of those of a stage's chunks
      [v,...], and those of `outer`, over the partitioner's axes. Sums begin as
      zeros, whose sharding the partitioner cannot infer.
  """
  lowered = lowering.lower(schedule, residuals)

  def gradient_fn(
    chunks: _Tree,
    outer: _Tree,
    batch: Mapping[str, jax.Array],
  ) -> model_functions.Gradients:
    _check_mesh(schedule)
    _check_arrays(schedule, chunks, batch)
    run = jax.shard_map(
      functools.partial(
        _run_stage,
        functions,
        lowered,
        schedule.num_chunks,
        frozenset(maxima),
        pin,
      ),
      in_specs=(_Spec(axes.STAGE), _Spec(), _Spec(), *_TABLE_SPECS),
      out_specs=_OUT_SPECS,
      axis_names={axes.STAGE},
      check_vma=False,
    )
    found = run(
      model_functions.to_stages(chunks, table=schedule),
      outer,
      dict(batch),
      jnp.asarray(lowered.cells),
      jnp.asarray(lowered.arrivals),
    )
    return found._replace(chunks=model_functions.from_stages(found.chunks))

  return gradient_fn


# The table is sharded over stages, so a stage has only its own columns.
_TABLE_SPECS = (_Spec(None, axes.STAGE), _Spec(None, axes.STAGE))
# The fields of `Gradients`.
_specs: Sequence[Any] = (_Spec(), _Spec(), _Spec(), _Spec(axes.STAGE), _Spec())
_OUT_SPECS = model_functions.Gradients(*_specs)


def _check_mesh(schedule: table.Table) -> None:
  sizes = jax.sharding.get_abstract_mesh().shape
  given = ",".join(f"{name}={n}" for name, n in sizes.items()) or "none"
  stages = schedule.num_stages
  if sizes.get(axes.STAGE) != stages:
    raise ValueError(
      f"Schedule {schedule.name!r} has {stages} stages and needs a mesh with"
      f" {axes.STAGE}={stages}, got the mesh '{given}'."
    )


def _check_arrays(
  schedule: table.Table, chunks: _Tree, batch: Mapping[str, jax.Array]
) -> None:
  number = schedule.num_virtual_stages
  for path, x in jax.tree.leaves_with_path(chunks):
    if x.ndim == 0 or x.shape[0] != number:
      raise ValueError(
        f"chunks{jax.tree_util.keystr(path)} has shape {list(x.shape)}; the"
        f" size of its first axis must be {number}, the number of virtual"
        f" stages of schedule {schedule.name!r}."
      )
  for name, x in batch.items():
    if x.ndim < 2 or x.shape[0] != schedule.num_microbatches:
      raise ValueError(
        f"batch[{name!r}] has shape {list(x.shape)}; expected [microbatches,"
        f" sequences, ...] with the {schedule.num_microbatches} microbatches of"
        f" schedule {schedule.name!r}."
      )


class _Sums(NamedTuple):
  """Sums over ticks; the gradients are float32."""

  loss: jax.Array
  auxiliary: jax.Array
  metrics: _Tree
  chunks: _Tree
  outer: _Tree


class _State(NamedTuple):
  """State of one stage between ticks.

  Attributes:
    mailbox: Messages, [slots,...].
    sums: Gradients, losses and metrics so far.
    residuals: Values that forward operations saved, [slots,...].
  """

  mailbox: _Tree
  sums: _Sums
  residuals: Sequence[jax.Array]


def _run_stage(
  functions: model_functions.ModelFunctions,
  lowered: lowering.Lowered,
  num_chunks: int,
  maxima: frozenset[str],
  pin: Callable[[_Tree], _Tree],
  chunks: _Tree,
  outer: _Tree,
  batch: Mapping[str, jax.Array],
  cells: jax.Array,
  arrivals: jax.Array,
) -> model_functions.Gradients:
  """Runs all ticks of one stage, inside of `shard_map`."""
  stage = _Stage(
    functions=functions,
    lowered=lowered,
    chunks=jax.tree.map(lambda x: x[0], chunks),
    num_chunks=num_chunks,
    outer=outer,
    batch=batch,
    maxima=maxima,
    pin=pin,
  )
  split = stage.split()
  runs = chunk_gradients.RECOMPUTING
  if split is not None:
    runs = chunk_gradients.make_saving(split)
  state, _ = lax.scan(
    lambda state, row: (stage.tick(runs, state, *row), None),
    stage.initial(split),
    (cells[:, 0], arrivals[:, 0]),
  )
  sums = state.sums
  outer = (
    {
      name: (lax.pmax if name in maxima else lax.psum)(part, axes.STAGE)
      for name, part in sums.outer.items()
    }
    if maxima
    else lax.psum(sums.outer, axes.STAGE)
  )
  return model_functions.Gradients(
    loss=lax.psum(sums.loss, axes.STAGE),
    auxiliary=lax.psum(sums.auxiliary, axes.STAGE),
    metrics={
      name: (
        (lax.pmax if metrics_lib.is_maximum(name) else lax.psum)(
          value, axes.STAGE
        ),
        lax.psum(weight, axes.STAGE),
      )
      for name, (value, weight) in sums.metrics.items()
    },
    chunks=jax.tree.map(lambda x: x[None], sums.chunks),
    outer=outer,
  )


def _combine(total: _Tree, new: _Tree, maxima: frozenset[str]) -> _Tree:
  """Combines gradients with those of another microbatch."""
  if not maxima:
    return jax.tree.map(jnp.add, total, new)
  return {
    name: jax.tree.map(
      jnp.maximum if name in maxima else jnp.add, part, new[name]
    )
    for name, part in total.items()
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stage:
  """Constants of one stage."""

  functions: model_functions.ModelFunctions
  lowered: lowering.Lowered
  chunks: _Tree
  num_chunks: int
  outer: _Tree
  batch: Mapping[str, jax.Array]
  maxima: frozenset[str]
  pin: Callable[[_Tree], _Tree]

  @functools.cached_property
  def shapes(self) -> model_functions.Shapes:
    """Shapes of activations and metrics."""
    return model_functions.check_shapes(
      self.functions,
      chunk=self._chunk(0),
      outer=self.outer,
      context=self._blank_context(),
    )

  def split(self) -> chunk_gradients.Split | None:
    """Returns the chunk as two functions, or None without residuals."""
    if not self.lowered.residuals:
      return None

    def function(
      chunk: _Tree, context: model_functions.Context, x: _Tree
    ) -> Any:
      return self.functions.chunk(chunk, x, context)

    abstract = jax.eval_shape(lambda: (self._chunk(0), self._blank_context()))
    return chunk_gradients.split(
      function, variables=abstract[0], others=abstract[1], x=self.shapes.x
    )

  def initial(self, split: chunk_gradients.Split | None) -> _State:
    shapes = self.shapes
    slots = self.lowered.residuals
    return _State(
      mailbox=jax.tree.map(
        lambda x: jnp.zeros((self.lowered.mailbox, *x.shape), x.dtype), shapes.x
      ),
      sums=_Sums(
        loss=jnp.float32(0),
        auxiliary=jnp.float32(0),
        metrics=metrics_lib.empty(shapes.metrics),
        chunks=self.pin(_zeros_float32(self.chunks)),
        outer=self.pin(_zeros_float32(self.outer)),
      ),
      residuals=[jnp.zeros((slots, *s.shape), s.dtype) for s in split.residuals]
      if split
      else (),
    )

  def tick(
    self,
    runs: Mapping[table.Kind, chunk_gradients.Run],
    state: _State,
    cells: jax.Array,
    arrivals: jax.Array,
  ) -> _State:
    """Runs one tick.

    Args:
      runs: The operations.
      state: Before the tick.
      cells: int32 [slots, COLUMNS].
      arrivals: int32 [routes].
    """
    results = []
    for slot in range(len(self.lowered.kinds)):
      cell = cells[slot]
      message, state = self._run_slot(runs, slot, state, cell)
      if self.lowered.has_local[slot]:
        mailbox = _put(state.mailbox, message, cell[_COLUMN["local"]])
        state = state._replace(mailbox=mailbox)
      results.append(message)
    mailbox = state.mailbox
    for number, route in enumerate(self.lowered.routes):
      arrived = jax.tree.map(
        lambda x, route=route: lax.ppermute(x, axes.STAGE, route.pairs),
        results[route.slot],
      )
      mailbox = _put(mailbox, arrived, arrivals[number])
    return state._replace(mailbox=mailbox)

  def _run_slot(
    self,
    runs: Mapping[table.Kind, chunk_gradients.Run],
    slot: int,
    state: _State,
    cell: jax.Array,
  ) -> tuple[_Tree, _State]:
    """Returns the message of an operation, and the new state."""
    sums, kinds = state.sums, self.lowered.kinds[slot]
    given = chunk_gradients.Operands(
      functions=self.functions,
      outer=self.outer,
      context=self._context(cell),
      is_first=cell[_COLUMN["is_first"]] == 1,
      residuals=_get(state.residuals, cell[_COLUMN["residuals"]]),
    )
    x = _get(state.mailbox, cell[_COLUMN["x"]])
    dy = _get(state.mailbox, cell[_COLUMN["dy"]])
    chunk_number = cell[_COLUMN["chunk"]]
    has_gradients = _Kind.BACKWARD in kinds
    has_residuals = _Kind.FORWARD in kinds

    def branch(
      run: chunk_gradients.Run, scope: str = "idle"
    ) -> Callable[[], chunk_gradients.Results]:
      def call() -> chunk_gradients.Results:
        with jax.named_scope(scope):
          made = run(given, self._chunk(chunk_number), x, dy)
        # A slot that never returns gradients or residuals carries no zeros of
        # their size.
        return made._replace(
          chunk=self.pin(made.chunk) if has_gradients else (),
          residuals=made.residuals if has_residuals else (),
        )

      return call

    # Kinds that never occur in this slot are not compiled for it.
    branches = [
      branch(chunk_gradients.idle),
      *(branch(runs[kind], self._live(slot, kind)) for kind in kinds),
    ]
    numbers = [kinds.index(k) + 1 if k in kinds else 0 for k in lowering.KINDS]
    number = jnp.asarray(numbers, jnp.int32)[cell[_COLUMN["kind"]]]
    made = lax.switch(number, branches)
    sums = sums._replace(auxiliary=sums.auxiliary + made.auxiliary)
    if has_gradients:
      total = _get(sums.chunks, chunk_number)
      total = _combine(total, made.chunk, self.maxima)
      totals = self.pin(_put(sums.chunks, total, chunk_number))
      sums = sums._replace(chunks=totals)
    if has_residuals and self.lowered.residuals:
      # A backward operation clears the slot that it was the last to read.
      number = cell[_COLUMN["residuals"]]
      saved = _put(state.residuals, made.residuals, number)
      state = state._replace(residuals=saved)
    message, sums = self._ends(slot, given, made.message, sums, cell)
    return message, state._replace(sums=sums)

  def _ends(
    self,
    slot: int,
    given: chunk_gradients.Operands,
    message: _Tree,
    sums: _Sums,
    cell: jax.Array,
  ) -> tuple[_Tree, _Sums]:
    """Runs the loss after the last chunk, and `first` backward."""
    kinds = self.lowered.kinds[slot]

    def is_kind(kind: table.Kind) -> jax.Array:
      return cell[_COLUMN["kind"]] == lowering.KINDS.index(kind)

    if _Kind.FORWARD in kinds:
      is_end = is_kind(_Kind.FORWARD) & (cell[_COLUMN["is_last"]] == 1)

      def head(y: _Tree, sums: _Sums) -> tuple[_Tree, _Sums]:
        with jax.named_scope(self._live(slot, _Kind.FORWARD, "is_last")):
          (loss, metrics), dy, outer = chunk_gradients.head(given, y)
        return dy, sums._replace(
          loss=sums.loss + loss,
          metrics=metrics_lib.add(
            jax.tree.map(lambda *x: jnp.stack(x), sums.metrics, metrics)
          ),
          outer=self.pin(_combine(sums.outer, outer, self.maxima)),
        )

      message, sums = lax.cond(
        is_end, head, lambda y, sums: (y, sums), message, sums
      )
    if _Kind.BACKWARD in kinds:

      def first(outer: _Tree) -> _Tree:
        with jax.named_scope(self._live(slot, _Kind.BACKWARD, "is_first")):
          new = chunk_gradients.first(given, message)
        return self.pin(_combine(outer, new, self.maxima))

      is_begin = is_kind(_Kind.BACKWARD) & given.is_first
      outer = lax.cond(is_begin, first, lambda outer: outer, sums.outer)
      sums = sums._replace(outer=outer)
    return message, sums

  def _live(self, slot: int, kind: table.Kind, column: str = "") -> str:
    """Returns the name scope of an operation: in how many slots it runs.

    Counts of FLOPs read it: `live_N_of_M`.
    """
    cells = self.lowered.cells[:, :, slot]
    runs = cells[..., _COLUMN["kind"]] == lowering.KINDS.index(kind)
    if column:
      runs &= cells[..., _COLUMN[column]] == 1
    return f"live_{runs.sum()}_of_{runs.size}"

  def _blank_context(self) -> model_functions.Context:
    return self._context(jnp.zeros(len(lowering.COLUMNS), jnp.int32))

  def _context(self, cell: jax.Array) -> model_functions.Context:
    microbatch = cell[_COLUMN["microbatch"]]
    virtual_stage = cell[_COLUMN["virtual_stage"]]
    inputs = {name: _get(x, microbatch) for name, x in self.batch.items()}
    return model_functions.Context(microbatch, virtual_stage, inputs)

  def _chunk(self, number: jax.Array | int) -> _Tree:
    # With one chunk no slice, which would be a copy of the weights.
    if self.num_chunks == 1:
      return jax.tree.map(lambda x: x[0], self.chunks)
    return _get(self.chunks, number)


def _zeros_float32(tree: _Tree) -> _Tree:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _get(tree: _Tree, number: jax.Array | int) -> _Tree:
  def get(x: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, number, keepdims=False)

  return jax.tree.map(get, tree)


def _put(tree: _Tree, new: _Tree, number: jax.Array) -> _Tree:
  def put(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, y, number, axis=0)

  return jax.tree.map(put, tree, new)
