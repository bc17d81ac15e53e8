"""One program for all stages that runs any table, and returns gradients.

  each stage, at each tick, for each slot of the tick:
    branch on the kind of operation; read the box, write nothing
    the model's last piece: head and loss, which give the output's gradient
    put what stays on the stage into the box
  send what each slot has made to the neighbours, whatever it is
  put what has arrived where the table says

Gradients are computed by the schedule's own operations. Never differentiate
through it: that would keep every tick.

Collectives over stages are outside of the branches, where all stages meet; in a
branch they would wait for stages that run another. For the same reason a chunk
must not permute over any mesh axis (such as ring attention does); sums and
gathers over other axes are fine. Buffers are read inside of branches and
written outside, because a branch that changes a buffer copies it.

Backward operations either run their piece forward again from its input: memory
is that of the inputs in the box, and time is that of rematerialization. The
parts of a backward pass that is split (B and W) then each do that, so tables of
them are right but gain no time. Or forward operations keep what gradients need
(`backward_split`): nothing is computed twice, and more is kept.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from paxon.pipeline.schedules import (
  backward,
  backward_split,
  lowering,
  model_functions,
  operation,
  table,
  virtual_stages,
)
from paxon.sharding import axes

_Spec = jax.sharding.PartitionSpec
_Tree = model_functions.Tree
_Kind = operation.Kind
_COLUMN = {name: n for n, name in enumerate(lowering.COLUMNS)}


def make_gradient_fn(
  functions: model_functions.ModelFunctions,
  *,
  schedule: table.Table,
  data_axes: Sequence[str] = (),
  maxima: Sequence[str] = (),
  residuals: lowering.Residuals = lowering.Residuals.RECOMPUTE,
  pin: Callable[[_Tree], _Tree] = lambda gradients: gradients,
) -> model_functions.GradientFn:
  """Returns `(chunks, outer, batch, key=None) -> Gradients`.

  `chunks` is a tree of arrays [K,...], one entry a virtual stage in the model's
  order (`virtual_stages.from_layers`), best sharded over the mesh axis `stage`.
  `outer` has the variables of `first` and `last`, tied ones once. `batch` has
  arrays [M,rows,...]. It is called under `jax.jit`, in the context of a mesh
  (`jax.set_mesh`) whose axis `stage` has the size of the schedule's stages.

  Args:
    functions: The model.
    schedule: Any valid table.
    data_axes: Mesh axes that split the rows. Gradients are summed over them
      once, at the end. Other mesh axes are the partitioner's.
    maxima: Entries of `chunks` and `outer`, which are dicts then, whose
      gradients are values, none negative, such as the amax of fp8: of several
      microbatches the largest is taken, not the sum.
    residuals: What forward operations keep for backward ones. For tables with
      B and W the layers of a chunk must then be written one after the other,
      since a loop over them is never cut in two.
    pin: Shards gradients of a chunk [...], sums of those of a stage's chunks
      [v,...], and those of `outer`, over the partitioner's axes. Sums begin as
      zeros, of which the partitioner cannot tell how weights are split.

  Raises:
    ValueError: The table is invalid.
  """
  functions = model_functions.with_own_keys(functions)
  lowered = lowering.lower(schedule, residuals)
  pieces = schedule.pieces

  def gradient_fn(
    chunks: _Tree,
    outer: _Tree,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
  ) -> model_functions.Gradients:
    _check_mesh(schedule, data_axes)
    _check_arrays(schedule, chunks, batch)
    rows = _Spec(None, tuple(data_axes) or None)
    run = jax.shard_map(
      functools.partial(
        _run_stage,
        functions,
        lowered,
        pieces.num_chunks,
        tuple(data_axes),
        frozenset(maxima),
        pin,
      ),
      in_specs=(_Spec(axes.STAGE), _Spec(), rows, _Spec(), *_TABLE_SPECS),
      out_specs=_OUT_SPECS,
      axis_names={axes.STAGE, *data_axes},
      check_vma=False,
    )
    found = run(
      virtual_stages.to_stages(chunks, pieces=pieces),
      outer,
      dict(batch),
      key,
      jnp.asarray(lowered.cells),
      jnp.asarray(lowered.arrivals),
    )
    own = virtual_stages.from_stages(found.chunks, pieces=pieces)
    return found._replace(chunks=own)

  return gradient_fn


# Each stage has its own columns of the table: no lookup by stage is needed.
_TABLE_SPECS = (_Spec(None, axes.STAGE), _Spec(None, axes.STAGE))
# The fields of `Gradients`.
_specs: Sequence[Any] = (_Spec(), _Spec(), _Spec(), _Spec(axes.STAGE), _Spec())
_OUT_SPECS = model_functions.Gradients(*_specs)


def _check_mesh(schedule: table.Table, data_axes: Sequence[str]) -> None:
  sizes = jax.sharding.get_abstract_mesh().shape
  given = ",".join(f"{name}={n}" for name, n in sizes.items()) or "none"
  stages = schedule.pieces.num_stages
  if sizes.get(axes.STAGE) != stages:
    raise ValueError(
      f"Schedule {schedule.name!r} has {stages} stages and needs a mesh whose"
      f" axis {axes.STAGE!r} has that size, got the mesh '{given}'; write"
      f" {axes.STAGE}={stages} into it."
    )
  for name in data_axes:
    if name not in sizes or name == axes.STAGE:
      raise ValueError(
        f"data_axes has {name!r}, which must be an axis of the mesh besides"
        f" {axes.STAGE!r}, got the mesh '{given}'."
      )


def _check_arrays(
  schedule: table.Table, chunks: _Tree, batch: Mapping[str, jax.Array]
) -> None:
  number = schedule.pieces.num_stages * schedule.pieces.num_chunks
  for path, x in jax.tree.leaves_with_path(chunks):
    if x.ndim == 0 or x.shape[0] != number:
      raise ValueError(
        f"chunks{jax.tree_util.keystr(path)} has shape {list(x.shape)}; its"
        f" first axis must have one entry for each of the {number} virtual"
        f" stages of schedule {schedule.name!r}."
      )
  for name, x in batch.items():
    if x.ndim < 2 or x.shape[0] != schedule.num_microbatches:
      raise ValueError(
        f"batch[{name!r}] has shape {list(x.shape)}; it must be [microbatches,"
        f" rows, ...] with the {schedule.num_microbatches} microbatches of"
        f" schedule {schedule.name!r}."
      )


class _Sums(NamedTuple):
  """What is added up over ticks; the gradients are float32."""

  loss: jax.Array
  auxiliary: jax.Array
  metrics: _Tree
  chunks: _Tree
  outer: _Tree


class _State(NamedTuple):
  """Of one stage between ticks.

  `box` has the messages [slots of the box,...], `sent` those of the tick before
  by slot, where messages take two ticks. `residuals` and `pairs` are what
  operations keep, [slots of the pool,...].
  """

  box: _Tree
  sent: tuple[_Tree, ...]
  sums: _Sums
  residuals: Sequence[jax.Array]
  pairs: Sequence[jax.Array]


def _run_stage(
  functions: model_functions.ModelFunctions,
  lowered: lowering.Lowered,
  num_chunks: int,
  data_axes: tuple[str, ...],
  maxima: frozenset[str],
  pin: Callable[[_Tree], _Tree],
  chunks: _Tree,
  outer: _Tree,
  batch: Mapping[str, jax.Array],
  key: jax.Array | None,
  cells: jax.Array,
  arrivals: jax.Array,
) -> model_functions.Gradients:
  """Runs all ticks of one stage; everything is what this stage has."""
  if key is not None:
    # Shards of the rows draw different numbers.
    for name in data_axes:
      key = jax.random.fold_in(key, lax.axis_index(name))
  stage = _Stage(
    functions=functions,
    lowered=lowered,
    chunks=jax.tree.map(lambda x: x[0], chunks),
    num_chunks=num_chunks,
    outer=outer,
    batch=batch,
    key=key,
    maxima=maxima,
    pin=pin,
  )
  split = stage.split()
  runs = backward.RECOMPUTING if split is None else backward.saving(split)
  state, _ = lax.scan(
    lambda state, row: (stage.tick(runs, state, *row), None),
    stage.initial(split),
    (cells[:, 0], arrivals[:, 0]),
  )
  sums, all_axes = state.sums, (axes.STAGE, *data_axes)
  own = _over(sums.chunks, data_axes, maxima)
  return model_functions.Gradients(
    loss=lax.psum(sums.loss, all_axes),
    auxiliary=lax.psum(sums.auxiliary, all_axes),
    metrics=lax.psum(sums.metrics, all_axes),
    chunks=jax.tree.map(lambda x: x[None], own),
    outer=_over(sums.outer, all_axes, maxima),
  )


def _over(
  tree: _Tree, mesh_axes: tuple[str, ...], maxima: frozenset[str]
) -> _Tree:
  """Returns gradients combined over mesh axes."""
  if not mesh_axes:
    return tree
  if not maxima:
    return lax.psum(tree, mesh_axes)
  return {
    name: (lax.pmax if name in maxima else lax.psum)(part, mesh_axes)
    for name, part in tree.items()
  }


def _added(total: _Tree, new: _Tree, maxima: frozenset[str]) -> _Tree:
  """Returns gradients combined with those of one more microbatch."""
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
  """What a stage has that ticks do not change."""

  functions: model_functions.ModelFunctions
  lowered: lowering.Lowered
  chunks: _Tree
  num_chunks: int
  outer: _Tree
  batch: Mapping[str, jax.Array]
  key: jax.Array | None
  maxima: frozenset[str]
  pin: Callable[[_Tree], _Tree]

  @functools.cached_property
  def shapes(self) -> model_functions.Shapes:
    """What passes between functions, as shapes."""
    return model_functions.shapes_of(
      self.functions,
      chunk=self._chunk(0),
      outer=self.outer,
      piece=self._first_piece(),
    )

  def split(self) -> backward_split.Split | None:
    """Returns the chunk in three parts, where operations keep something."""
    if not self.lowered.residuals:
      return None

    def piece(chunk: _Tree, piece: model_functions.Piece, x: _Tree) -> Any:
      return self.functions.chunk(chunk, x, piece)

    abstract = jax.eval_shape(lambda: (self._chunk(0), self._first_piece()))
    found = backward_split.split(
      piece, variables=abstract[0], others=abstract[1], x=self.shapes.x
    )
    if self.lowered.pairs and not found.splits:
      raise ValueError(
        "ModelFunctions.chunk gives gradients of its variables together with"
        " that of its input, so nothing of it can wait: write its layers one"
        " after the other, not as a loop or as one rematerialized function, or"
        " take a schedule without W, or Residuals.RECOMPUTE."
      )
    return found

  def initial(self, split: backward_split.Split | None) -> _State:
    shapes = self.shapes
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.x)
    sent = ()
    if self.lowered.latency > 1:
      sent = (blank,) * len(self.lowered.kinds)
    return _State(
      box=jax.tree.map(
        lambda x: jnp.zeros((self.lowered.box, *x.shape), x.dtype), blank
      ),
      sent=sent,
      sums=_Sums(
        loss=jnp.float32(0),
        auxiliary=jnp.float32(0),
        metrics=jax.tree.map(
          lambda x: jnp.zeros(x.shape, x.dtype), shapes.metrics
        ),
        chunks=self.pin(_zeros_float32(self.chunks)),
        outer=self.pin(_zeros_float32(self.outer)),
      ),
      residuals=_pool(split.residuals, self.lowered.residuals) if split else (),
      pairs=_pool(split.pairs, self.lowered.pairs) if split else (),
    )

  def tick(
    self,
    runs: Mapping[operation.Kind, backward.Run],
    state: _State,
    cells: jax.Array,
    arrivals: jax.Array,
  ) -> _State:
    """Runs one tick.

    Args:
      runs: The operations.
      state: Before it.
      cells: int32 [slots, COLUMNS].
      arrivals: int32 [routes].
    """
    made = []
    for slot, kinds in enumerate(self.lowered.kinds):
      cell = cells[slot]
      message, state = self._run_slot(runs, kinds, state, cell)
      if self.lowered.has_local[slot]:
        box = _put(state.box, message, cell[_COLUMN["local"]])
        state = state._replace(box=box)
      made.append(message)
    box = state.box
    # With a latency of two, what was made a tick ago moves beside this tick.
    moving = state.sent or made
    for number, route in enumerate(self.lowered.routes):
      arrived = jax.tree.map(
        lambda x, route=route: lax.ppermute(x, axes.STAGE, route.pairs),
        moving[route.slot],
      )
      box = _put(box, arrived, arrivals[number])
    return state._replace(box=box, sent=tuple(made) if state.sent else ())

  def _run_slot(
    self,
    runs: Mapping[operation.Kind, backward.Run],
    kinds: Sequence[operation.Kind],
    state: _State,
    cell: jax.Array,
  ) -> tuple[_Tree, _State]:
    """Returns what an operation sends, and the state with what it adds."""
    box, sums = state.box, state.sums
    piece = self._piece(cell)
    given = backward.Given(
      functions=self.functions,
      outer=self.outer,
      piece=piece,
      is_first=cell[_COLUMN["is_first"]] == 1,
      residuals=_get(state.residuals, cell[_COLUMN["kept"]]),
      pairs=_get(state.pairs, cell[_COLUMN["pairs"]]),
    )
    x = _get(box, cell[_COLUMN["x"]])
    dy = _get(box, cell[_COLUMN["dy"]])
    chunk_number = cell[_COLUMN["chunk"]]
    has_gradients = _Kind.BACKWARD in kinds or _Kind.WEIGHT_GRADIENT in kinds
    keeps = {
      "residuals": _Kind.FORWARD in kinds,
      "pairs": _Kind.INPUT_GRADIENT in kinds,
    }

    def branch(run: Any) -> Callable[[], backward.Made]:
      def call() -> backward.Made:
        made = run(given, self._chunk(chunk_number), x, dy)
        # In a slot that never makes them, nothing carries zeros of their size.
        none = {name: () for name, has in keeps.items() if not has}
        if has_gradients:
          made = made._replace(chunk=self.pin(made.chunk))
        else:
          none["chunk"] = ()
        return made._replace(**none)

      return call

    # Kinds that never occur in this slot are not compiled for it.
    branches = [branch(backward.nothing), *(branch(runs[k]) for k in kinds)]
    numbers = [kinds.index(k) + 1 if k in kinds else 0 for k in lowering.KINDS]
    number = jnp.asarray(numbers, jnp.int32)[cell[_COLUMN["kind"]]]
    made = lax.switch(number, branches)
    sums = sums._replace(auxiliary=sums.auxiliary + made.auxiliary)
    if has_gradients:
      total = _get(sums.chunks, chunk_number)
      total = _added(total, made.chunk, self.maxima)
      totals = self.pin(_put(sums.chunks, total, chunk_number))
      sums = sums._replace(chunks=totals)
    if keeps["residuals"] and self.lowered.residuals:
      kept = _put(state.residuals, made.residuals, cell[_COLUMN["keeps"]])
      state = state._replace(residuals=kept)
    if keeps["pairs"] and self.lowered.pairs:
      kept = _put(state.pairs, made.pairs, cell[_COLUMN["pairs_kept"]])
      state = state._replace(pairs=kept)
    message, sums = self._ends(kinds, given, made.message, sums, cell)
    return message, state._replace(sums=sums)

  def _ends(
    self,
    kinds: Sequence[operation.Kind],
    given: backward.Given,
    message: _Tree,
    sums: _Sums,
    cell: jax.Array,
  ) -> tuple[_Tree, _Sums]:
    """Runs the loss after the last piece, and `first` backward."""

    def is_one_of(*among: operation.Kind) -> jax.Array:
      kind = cell[_COLUMN["kind"]]
      found = [kind == lowering.KINDS.index(k) for k in among]
      return functools.reduce(jnp.logical_or, found)

    if _Kind.FORWARD in kinds:
      is_end = is_one_of(_Kind.FORWARD) & (cell[_COLUMN["is_last"]] == 1)

      def head(y: _Tree, sums: _Sums) -> tuple[_Tree, _Sums]:
        (loss, metrics), dy, outer = backward.head(given, y)
        return dy, sums._replace(
          loss=sums.loss + loss,
          metrics=jax.tree.map(jnp.add, sums.metrics, metrics),
          outer=self.pin(_added(sums.outer, outer, self.maxima)),
        )

      message, sums = lax.cond(
        is_end, head, lambda y, sums: (y, sums), message, sums
      )
    used = [k for k in operation.INPUT_GRADIENT_KINDS if k in kinds]
    if used:

      def first(outer: _Tree) -> _Tree:
        new = backward.first(given, message)
        return self.pin(_added(outer, new, self.maxima))

      is_begin = is_one_of(*used) & given.is_first
      outer = lax.cond(is_begin, first, lambda outer: outer, sums.outer)
      sums = sums._replace(outer=outer)
    return message, sums

  def _first_piece(self) -> model_functions.Piece:
    return self._piece(jnp.zeros(len(lowering.COLUMNS), jnp.int32))

  def _piece(self, cell: jax.Array) -> model_functions.Piece:
    microbatch = cell[_COLUMN["microbatch"]]
    virtual_stage = cell[_COLUMN["virtual_stage"]]
    key = self.key
    if key is not None:
      key = jax.random.fold_in(key, microbatch)
      key = jax.random.fold_in(key, virtual_stage)
    inputs = {name: _get(x, microbatch) for name, x in self.batch.items()}
    return model_functions.Piece(microbatch, virtual_stage, inputs, key)

  def _chunk(self, number: jax.Array | int) -> _Tree:
    # With one chunk no slice, which would be a copy of the weights.
    if self.num_chunks == 1:
      return jax.tree.map(lambda x: x[0], self.chunks)
    return _get(self.chunks, number)


def _zeros_float32(tree: _Tree) -> _Tree:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _pool(
  shapes: Sequence[jax.ShapeDtypeStruct], slots: int
) -> list[jax.Array]:
  # Without a slot nothing is read; an array of none could not be indexed.
  return [jnp.zeros((slots, *s.shape), s.dtype) for s in shapes if slots]


def _get(tree: _Tree, number: jax.Array | int) -> _Tree:
  def get(x: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, number, keepdims=False)

  return jax.tree.map(get, tree)


def _put(tree: _Tree, new: _Tree, number: jax.Array) -> _Tree:
  def put(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, y, number, axis=0)

  return jax.tree.map(put, tree, new)
