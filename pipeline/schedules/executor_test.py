"""Tests for the program that runs tables: it is the sequential model."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing as layers_testing
from paxon.pipeline.schedules import (
  chunk_gradients,
  executor,
  generators,
  lowering,
  model_functions,
  scheduled_stack,
  testing,
)

MICROBATCHES = 4
LAYERS = 8


def _mesh(stages, data=1):
  kinds = (jax.sharding.AxisType.Auto,) * 2
  devices = jax.devices()[: stages * data]
  return jax.make_mesh(
    (data, stages), ("data", "stage"), axis_types=kinds, devices=devices
  )


def _given(schedule, *, tied=False, microbatches=MICROBATCHES):
  layers, outer = testing.variables(num_layers=LAYERS, tied=tied)
  chunks = model_functions.split_layers(
    layers, num_virtual_stages=schedule.num_virtual_stages
  )
  return chunks, outer, testing.batch(num_microbatches=microbatches)


def _compare(schedule, *, tied=False, data=1, saves=False):
  model = testing.functions(tied=tied)
  given = _given(schedule, tied=tied)
  want = jax.jit(
    testing.sequential_gradient_fn(
      model, num_virtual_stages=schedule.num_virtual_stages
    )
  )(*given)
  with jax.set_mesh(_mesh(schedule.num_stages, data)):
    spec = jax.sharding.PartitionSpec(None, "data")
    chunks, outer, batch = given
    placed = {
      name: x if name == "key" else jax.device_put(x, spec)
      for name, x in batch.items()
    }
    got = jax.jit(
      executor.make_gradient_fn(
        model,
        schedule=schedule,
        residuals=lowering.Residuals.SAVE
        if saves
        else lowering.Residuals.RECOMPUTE,
      )
    )(chunks, outer, placed)

  def check(path, a, b):
    scale = np.max(np.abs(b))
    assert np.max(np.abs(a - b)) <= 1e-5 * scale, jax.tree_util.keystr(path)

  jax.tree.map_with_path(check, got, want)


# Random cases of linen models are in `scheduled_gradients_test`.
@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  ("make", "stages", "options"),
  [
    pytest.param(testing.gpipe, 2, {"data": 2}, id="gpipe"),
    pytest.param(generators.one_f_one_b, 2, {"tied": True}, id="1f1b"),
    pytest.param(
      generators.one_f_one_b, 4, {"saves": True, "data": 2}, id="1f1b-saves"
    ),
    # Both neighbors of a stage are one stage.
    pytest.param(
      generators.interleaved_two_slots,
      2,
      {"tied": True, "saves": True},
      id="interleaved-saves",
    ),
    pytest.param(generators.interleaved_two_slots, 4, {}, id="interleaved"),
    pytest.param(
      generators.one_f_one_b_two_slots,
      4,
      {"tied": True, "saves": True, "data": 2},
      id="two-slot-saves",
    ),
  ],
)
def test_loss_and_gradients_are_the_sequential_models(make, stages, options):
  schedule = make(num_stages=stages, num_microbatches=MICROBATCHES)
  _compare(schedule, **options)


def _lowered(microbatches):
  # With one chunk a stage; several would go to and from their stages, outside.
  schedule = generators.one_f_one_b_two_slots(
    num_stages=4, num_microbatches=microbatches
  )
  given = _given(schedule, tied=True, microbatches=microbatches)
  gradient_fn = executor.make_gradient_fn(
    testing.functions(tied=True), schedule=schedule
  )
  return jax.jit(gradient_fn).lower(*given)


def _computations(text):
  """The lines of each computation of a compiled program, by name."""
  computations, name = {}, ""
  for line in text.splitlines():
    if line.startswith(("%", "ENTRY")):
      name = re.findall(r"%([\w.\-]+)", line)[0]
    computations.setdefault(name, []).append(line)
  return computations


def _called(computations, by, attribute):
  """The computations that operations call, and what these call."""
  inside = set()
  for lines in computations.values():
    for line in lines:
      if f" {by}(" in line:
        _, _, called = line.partition(f"{attribute}=")
        inside |= set(re.findall(r"%([\w.\-]+)", re.split(r"[},]", called)[0]))
        if called.startswith("{"):
          inside |= set(re.findall(r"%([\w.\-]+)", called.partition("}")[0]))
  before = set()
  while before != inside:
    before = set(inside)
    for name in before:
      called = re.findall(r"%([\w.\-]+)", "\n".join(computations[name][1:]))
      inside |= set(called) & set(computations)
  return inside


_COLLECTIVE = re.compile(
  r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
  r"|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)


def _collectives(computations, among):
  """(kind, number of elements) of each in some computations."""
  found = []
  for name in among:
    for line in computations[name]:
      for shapes, kind in _COLLECTIVE.findall(line):
        dimensions = re.findall(r"\w\d+\[([\d,]*)\]", shapes)
        sizes = [
          np.prod([int(n) for n in d.split(",") if n]) for d in dimensions
        ]
        found.append((kind, int(sum(sizes))))
  return found


def test_the_program_does_not_grow_and_only_neighbours_talk_in_the_loop():
  with jax.set_mesh(_mesh(4)):
    few, many = _lowered(8), _lowered(32)
    assert few.as_text().count("\n") == many.as_text().count("\n")
    computations = _computations(few.compile().as_text())
  branches = _called(computations, "conditional", "branch_computations")
  ticks = _called(computations, "while", "body")
  assert branches
  assert branches < ticks
  # A forward slot sends on, a backward slot sends back, outside of branches.
  kinds = [kind for kind, _ in _collectives(computations, ticks)]
  assert kinds == ["collective-permute"] * 2
  assert not _collectives(computations, branches)
  # After it losses and metrics are added up, and what all stages share: the
  # embedding that is the head, once.
  after = _collectives(computations, set(computations) - ticks)
  assert {kind for kind, _ in after} == {"all-reduce"}
  numbers = 4
  assert sum(size for _, size in after) == (
    testing.VOCAB * testing.EMBED + numbers
  )


def test_permutes_in_branches_are_found():
  """Made by hand: each half of the devices would wait for the other."""
  mesh = _mesh(2, 2)
  spec = jax.sharding.PartitionSpec(("data", "stage"))

  def shifted(x):
    return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])

  def run(permutes, x):
    def branch(x):
      stage = jax.lax.axis_index("stage")
      return jax.lax.cond(stage == 0, shifted, lambda x: 2 * x, x)

    fn = branch if permutes else shifted
    return jax.shard_map(fn, in_specs=spec, out_specs=spec, check_vma=False)(x)

  with jax.set_mesh(mesh):
    for permutes in (False, True):
      traced = jax.jit(run, static_argnums=0).lower(permutes, jnp.ones((4, 3)))
      found = scheduled_stack.count_branch_permutes(traced.compile().as_text())
      assert found == permutes


def _matmuls(fn, *args):
  return str(jax.make_jaxpr(fn)(*args)).count(" dot_general[")


def test_saved_residuals_compute_nothing_twice():
  """Two layers of two matmuls: four forward, four for dx, four for dw."""

  def chunk(kernels, scale, x):
    for up, down in kernels:
      x = x + jnp.tanh(x @ up) @ down * jnp.float32(scale)
    return x, jnp.sum(x * x)

  kernels = [
    (layers_testing.normal(4, 6, seed=i), layers_testing.normal(6, 4, seed=9))
    for i in range(2)
  ]
  x, dy = (layers_testing.normal(3, 4, seed=i) for i in (3, 4))
  scale = jnp.float32(0.5)
  made = chunk_gradients.split(chunk, variables=kernels, others=scale, x=x)
  free = (kernels, scale)
  (y, auxiliary), residuals = made.forward(free, x)
  dw, dx = made.backward(free, residuals, dy)
  want, pull = jax.vjp(lambda w, x: chunk(w, scale, x), kernels, x)
  for a, e in zip(
    jax.tree.leaves(((y, auxiliary), dw, dx)),
    jax.tree.leaves((want, *pull((dy, jnp.float32(1))))),
    strict=True,
  ):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
  assert _matmuls(made.forward, free, x) == 4
  assert _matmuls(made.backward, free, residuals, dy) == 8
  # Kernels are never saved: everything saved has the batch's first axis.
  for saved in made.residuals:
    assert saved.shape[0] == 3


def test_backward_passes_keep_the_names_of_modules():
  """Plans and profiles distinguish layers and backward passes by them."""

  def chunk(kernel, scale, x):
    with jax.named_scope("layer"):
      y = jax.jit(lambda x: jnp.tanh(x @ kernel))(x) * scale
    return y, jnp.sum(y)

  kernel, x = layers_testing.normal(4, 4), layers_testing.normal(3, 4, seed=2)
  scale = jnp.float32(0.5)
  made = chunk_gradients.split(chunk, variables=kernel, others=scale, x=x)
  jaxpr = jax.make_jaxpr(made.backward)((kernel, scale), made.residuals, x)
  matmuls = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
  assert len(matmuls) == 2
  for eqn in matmuls:
    name = str(eqn.source_info.name_stack)
    assert "transpose(" in name
    assert "layer" in name


def test_unsuitable_meshes_and_arrays_are_rejected():
  schedule = testing.gpipe(num_stages=2, num_microbatches=MICROBATCHES)
  chunks, outer, batch = _given(schedule)
  model = testing.functions(tied=False)
  gradient_fn = executor.make_gradient_fn(model, schedule=schedule)
  message = (
    r"'GPipe' has 2 stages and needs a mesh with stage=2, got the mesh '{}'"
  )
  with pytest.raises(ValueError, match=message.format("none")):
    gradient_fn(chunks, outer, batch)
  with (
    jax.set_mesh(_mesh(4)),
    pytest.raises(ValueError, match=message.format("data=1,stage=4")),
  ):
    gradient_fn(chunks, outer, batch)
  with jax.set_mesh(_mesh(2)):
    more = jax.tree.map(lambda x: x[:1], chunks)
    with pytest.raises(ValueError, match=r"chunks\['bias'\] has shape \[1, 4"):
      gradient_fn(more, outer, batch)
    with pytest.raises(ValueError, match=r"batch\['ids'\] has shape \[3, 4, 3"):
      gradient_fn(chunks, outer, {"ids": batch["ids"][:3]})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    pytest.param(
      {"first": lambda outer, context: context.inputs["ids"]},
      r"first must return floating arrays, .* got int32\[4, 3\]",
      id="integers",
    ),
    pytest.param(
      {"chunk": lambda variables, x, context: (x[:, :1], jnp.float32(0))},
      r"chunk must return an output like its input.*4, 3, 4.*4, 1, 4",
      id="shapes",
    ),
    pytest.param(
      {"last": lambda outer, y, context: (y, {})},
      r"last must return a floating scalar .* got float32\[4, 3, 4\]",
      id="no-scalar",
    ),
  ],
)
def test_functions_that_do_not_fit_together_are_rejected(changes, message):
  schedule = testing.gpipe(num_stages=1, num_microbatches=MICROBATCHES)
  model = dataclasses.replace(testing.functions(tied=True), **changes)
  given = _given(schedule, tied=True)
  gradient_fn = executor.make_gradient_fn(model, schedule=schedule)
  with (
    jax.set_mesh(_mesh(1)),
    pytest.raises(ValueError, match=message),
  ):
    jax.eval_shape(gradient_fn, *given)


def test_layers_must_divide_by_virtual_stages():
  with pytest.raises(
    ValueError, match=r"number of layers \(8\) must be a multiple of the 12"
  ):
    model_functions.split_layers(
      {"w": jnp.zeros((8, 2))}, num_virtual_stages=12
    )


def test_chunks_of_a_stage_are_a_round_apart():
  schedule = generators.interleaved_two_slots(num_stages=2, num_microbatches=2)
  chunks = model_functions.split_layers(jnp.arange(8), num_virtual_stages=4)
  staged = model_functions.to_stages(chunks, table=schedule)
  np.testing.assert_array_equal(staged, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]])
  back = model_functions.from_stages(staged)
  np.testing.assert_array_equal(
    model_functions.merge_layers(back), np.arange(8)
  )


def test_memory_is_that_of_the_schedule():
  """Of 16 microbatches GPipe keeps all, two-slot 1F1B a few."""
  temporary = {}
  for make in (testing.gpipe, generators.one_f_one_b_two_slots):
    schedule = make(num_stages=2, num_microbatches=16)
    model = testing.functions(tied=True)
    given = _given(schedule, tied=True, microbatches=16)
    gradient_fn = executor.make_gradient_fn(model, schedule=schedule)
    with jax.set_mesh(_mesh(2)):
      lowered = jax.jit(gradient_fn).lower(*given)
    memory = lowered.compile().memory_analysis()
    temporary[make] = memory.temp_size_in_bytes
    boxes = lowering.lower(schedule).mailbox
    activation = 4 * testing.ROWS * testing.LENGTH * testing.EMBED
    assert temporary[make] >= boxes * activation
  saved = temporary[testing.gpipe] - temporary[generators.one_f_one_b_two_slots]
  # Of 16 inputs and 16 gradients, all but a few.
  assert saved >= 24 * activation
