"""Plans of functions, compared with what JAX says of the same functions."""

import dataclasses
import functools
import pickle
import re

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from paxon.runner import user_error
from paxon.runner.plan import result
from paxon.runner.plan import target as targets
from paxon.runner.plan import testing as plan_testing
from paxon.runner.plan.functions import (
  function_plan,
  meshes,
  testing,
  worker,
)


def _plan(function, *arguments, **options):
  """Plans in this process, which has eight CPU devices."""
  request = testing.trace(function, *arguments, **options)
  return worker.plan(pickle.loads(pickle.dumps(request)))


def _make_mesh(**sizes):
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
  )


def _compile(function, *arguments, mesh, in_shardings, donate=()):
  """Compiles for the devices of this process, as a user would."""
  shardings = jax.tree.map(
    lambda spec: NamedSharding(mesh, spec),
    in_shardings,
    is_leaf=lambda each: isinstance(each, P),
  )
  with jax.set_mesh(mesh):
    jitted = jax.jit(function, in_shardings=shardings, donate_argnums=donate)
    return jitted.lower(*arguments).compile()


def _check_sizes(plan, compiled):
  sizes = compiled.memory_analysis()
  assert plan.memory.arguments == sizes.argument_size_in_bytes
  assert plan.memory.temporaries == sizes.temp_size_in_bytes
  assert plan.memory.peak == (
    sizes.argument_size_in_bytes
    + sizes.temp_size_in_bytes
    + sizes.output_size_in_bytes
    - sizes.alias_size_in_bytes
  )


@pytest.mark.parametrize(
  "specs",
  [(P("fsdp"), P("fsdp")), (P(None, "fsdp"), P()), (P(), P("fsdp"))],
  ids=["rows", "columns", "batch"],
)
def test_memory_is_what_jax_says_of_the_same_program(specs):
  plan = _plan(
    testing.step,
    testing.WEIGHTS,
    testing.BATCH,
    mesh={"fsdp": 8},
    in_shardings=specs,
    donate="weights",
  )
  compiled = _compile(
    testing.step,
    testing.WEIGHTS,
    testing.BATCH,
    mesh=_make_mesh(fsdp=8),
    in_shardings=specs,
    donate=0,
  )
  _check_sizes(plan, compiled)
  assert plan.flops.hardware == testing.FLOPS
  assert plan.mesh == {"fsdp": 8}
  assert sum(plan.memory.inputs.values()) == plan.memory.state_and_batch
  assert plan.memory.state_and_batch == plan.memory.arguments


def test_settings_of_jit_are_kept():
  mesh = _make_mesh(data=2, fsdp=4)
  weights, batch = (
    NamedSharding(mesh, P("fsdp")),
    NamedSharding(mesh, P(("data", "fsdp"))),
  )
  jitted = jax.jit(
    testing.step, in_shardings=(weights, batch), donate_argnums=0
  )
  plan = _plan(jitted, testing.WEIGHTS, testing.BATCH)
  _check_sizes(plan, jitted.lower(testing.WEIGHTS, testing.BATCH).compile())
  assert plan.mesh == {"data": 2, "fsdp": 4}
  request = testing.trace(jitted, testing.WEIGHTS, testing.BATCH)
  assert request.donated == (0, 1, 2)
  assert request.labels == (
    "weights[0]",
    "weights[1]",
    "weights[2]",
    "batch",
  )
  # Given here, they win.
  other = testing.trace(
    jitted, testing.WEIGHTS, testing.BATCH, in_shardings=(P(), None)
  )
  assert other.specs == (P(), P(), P(), P(("data", "fsdp")))


def _mapped(mesh):
  def block(weights, batch):
    return jax.lax.pmean(batch @ weights[0], "data")

  return jax.shard_map(
    block,
    mesh=mesh,
    in_specs=([P()] * testing.LAYERS, P("data")),
    out_specs=P(),
  )


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function])
def test_arguments_of_mapped_functions_are_split_as_they_say(wrap):
  mesh = _make_mesh(data=8)
  request = testing.trace(
    wrap(_mapped(mesh)), testing.WEIGHTS, testing.BATCH, mesh=mesh
  )
  assert request.specs == (P(), P(), P(), P("data"))
  other = {"batch": 8}
  with pytest.raises(user_error.UserError, match=r"mesh: .* has a mesh that d"):
    testing.trace(
      wrap(_mapped(mesh)), testing.WEIGHTS, testing.BATCH, mesh=other
    )


def test_shardings_of_arrays_are_kept():
  sharding = NamedSharding(_make_mesh(fsdp=8), P("fsdp"))
  weights = [
    jax.device_put(jnp.zeros((testing.WIDTH, testing.WIDTH)), sharding)
  ] * testing.LAYERS
  plan = _plan(testing.step, weights, testing.BATCH, donate=0)
  assert plan.memory.inputs == {
    **{
      f"weights[{i}]": 4 * testing.WIDTH**2 // 8 for i in range(testing.LAYERS)
    },
    "batch": 4 * testing.ROWS * testing.WIDTH,
  }
  assert {c.kind for c in plan.collectives} >= {"all-gather"}


class _Network(nnx.Module):
  def __init__(self, rngs):
    self.inner = nnx.Linear(
      testing.WIDTH, 2 * testing.WIDTH, use_bias=False, rngs=rngs
    )
    self.outer = nnx.Linear(
      2 * testing.WIDTH, testing.WIDTH, use_bias=False, rngs=rngs
    )

  def __call__(self, x):
    return self.outer(jax.nn.relu(self.inner(x)))


@nnx.jit
def _update(network, optimizer, batch):
  loss, gradients = nnx.value_and_grad(lambda n: jnp.sum(n(batch) ** 2))(
    network
  )
  optimizer.update(network, gradients)
  return loss


def test_modules_that_a_function_changes_are_results():
  def make():
    network = _Network(nnx.Rngs(0))
    return network, nnx.Optimizer(
      network, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param
    )

  network, optimizer = nnx.eval_shape(make)
  plan = _plan(
    _update,
    network,
    optimizer,
    testing.BATCH,
    mesh={"data": 8},
    in_shardings=(None, None, P("data")),
    donate=("network", "optimizer"),
  )
  # Without the update there would be no gradients: two matmuls.
  assert plan.flops.hardware == 5 * 2 * testing.ROWS * 2 * testing.WIDTH**2
  weights = 2 * 2 * testing.WIDTH**2 * 4
  assert plan.memory.inputs["network.inner"] == weights // 2
  assert plan.memory.inputs["optimizer.opt_state"] == weights
  assert plan.memory.peak < 2 * plan.memory.arguments
  (reduced,) = [c for c in plan.collectives if c.kind == "all-reduce"]
  assert reduced.payload_bytes == weights + 4  # Of the gradients and the loss.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Layer:
  """As equinox has them: a tree with leaves that are not arrays."""

  weight: jax.ShapeDtypeStruct
  activation: object
  scale: float
  bias: object = None


def test_modules_are_found_at_any_depth():
  network = nnx.eval_shape(lambda: _Network(nnx.Rngs(0)))

  def update(parts, batch):
    gradients = nnx.grad(lambda n: jnp.sum(n(batch) ** 2))(parts["network"])
    old = nnx.state(parts["network"], nnx.Param)
    nnx.update(parts["network"], jax.tree.map(jnp.subtract, old, gradients))

  plan = _plan(
    update,
    {"network": network},
    testing.BATCH,
    mesh={"data": 8},
    in_shardings=(None, P("data")),
  )
  assert plan.flops.hardware == 5 * 2 * testing.ROWS * 2 * testing.WIDTH**2


def test_one_variable_in_two_places_is_an_error():
  network = nnx.eval_shape(lambda: _Network(nnx.Rngs(0)))
  with pytest.raises(user_error.UserError, match=r"are one nnx\.Variable"):
    testing.trace(lambda a, b, x: a(x) + b(x), network, network, testing.BATCH)


def test_constants_that_a_function_closes_over_are_in_the_memory():
  big = jax.random.normal(jax.random.key(0), (512, 512))
  size = 512 * 512 * 4
  x = jax.ShapeDtypeStruct((8, 512), jnp.float32)
  plans = [
    _plan(function, x, target="cpu:8", mesh={"data": 8})
    for function in (
      lambda x: x @ big,
      jax.jit(lambda x: x @ big),
      functools.partial(lambda weight, x: x @ weight, big),
    )
  ]
  whole = _plan(lambda x, big: x @ big, x, big, mesh={"data": 8})
  for plan in plans:
    assert plan.memory.inputs == {"x": 8 * 512 * 4, "constants": size}
    assert plan.memory.arguments == whole.memory.arguments
    assert plan.memory.peak == whole.memory.peak


def test_numbers_of_64_bits_are_those_of_the_caller():
  with jax.enable_x64(True):
    x = jax.ShapeDtypeStruct((256,), jnp.float64)
    plan = function_plan.plan(lambda x: x * 2, x, target="cpu:1")
  assert plan.memory.arguments == 256 * 8
  narrow = testing.trace(lambda x: x * 2, np.zeros(256), mesh={"data": 8})
  assert narrow.inputs == {"x": 256 * 4}


def test_settings_of_inner_functions_are_kept():
  mesh = _make_mesh(data=8)
  spec = NamedSharding(mesh, P("data"))
  inner = jax.jit(lambda x: x * 2, in_shardings=spec)
  twice = testing.trace(jax.jit(lambda x: inner(x)), testing.BATCH)
  assert twice.specs == (P("data"),)
  mapped = jax.shard_map(
    lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data")
  )
  both = testing.trace(
    lambda x: mapped(x) + mapped(x), testing.BATCH, mesh=mesh
  )
  assert both.specs == (P("data"),)


def test_what_is_replicated_for_lack_of_a_sharding_is_named():
  plan = _plan(
    testing.step,
    testing.WEIGHTS,
    testing.BATCH,
    mesh={"data": 8},
    in_shardings=(None, P("data")),
  )
  names = "weights[0], weights[1], weights[2]"
  assert plan.notes[0] == (
    f"Replicated, because no sharding is given: {names}."
  )


def test_explicit_axes_see_the_shardings_of_arguments():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
  found = []

  def apply(x):
    found.append(jax.typeof(x).sharding.spec)
    return x * 2

  testing.trace(apply, testing.BATCH, mesh=mesh, in_shardings=(P("data"),))
  assert set(found) == {P("data", None)}


def test_loops_of_unknown_length_are_not_taken_for_repeated_work():
  def repeat(x):
    def body(carry):
      i, x = carry
      return i + 1, jnp.tanh(x @ x.T @ x)

    return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (0, x))[1]

  plan = _plan(
    repeat, testing.BATCH, mesh={"data": 8}, in_shardings=(P("data"),)
  )
  assert not any("the same work" in text for text in plan.warnings)
  assert any("while" in note for note in plan.notes)


def test_leaves_that_are_not_arrays_are_constants():
  layer = _Layer(testing.WEIGHTS[0], jnp.tanh, 0.5)

  def apply(layer, batch):
    return layer.activation(batch @ layer.weight) * layer.scale

  request = testing.trace(
    apply,
    layer,
    testing.BATCH,
    mesh={"data": 8},
    in_shardings=(P(None, "data"), P("data")),
  )
  assert request.labels == ("layer.weight", "batch")
  assert request.specs == (P(None, "data"), P("data"))
  assert (
    worker.plan(request).flops.hardware == 2 * testing.ROWS * testing.WIDTH**2
  )


def test_a_function_finds_the_mesh_in_its_context():
  def apply(weights, batch):
    def block(batch, weights):
      return jax.lax.psum(batch @ weights, "tensor")

    inner = jax.shard_map(
      block, in_specs=(P("data", "tensor"), P("tensor")), out_specs=P("data")
    )
    return jax.lax.with_sharding_constraint(inner(batch, weights), P("data"))

  plan = _plan(
    apply,
    testing.WEIGHTS[0],
    testing.BATCH,
    mesh={"data": 2, "tensor": -1},
    in_shardings=(P("tensor"), P("data", "tensor")),
  )
  assert plan.mesh == {"data": 2, "tensor": 4}
  (reduced,) = plan.collectives
  assert (reduced.kind, reduced.axes) == ("all-reduce", ("tensor",))
  assert reduced.payload_bytes == testing.ROWS // 2 * testing.WIDTH * 4


def test_explicit_axes_and_keys_of_random_numbers():
  mesh = jax.sharding.AbstractMesh(
    (8,), ("data",), axis_types=(AxisType.Explicit,)
  )

  def noise(key, batch):
    return batch + jax.random.normal(key, batch.shape, out_sharding=P("data"))

  key = jax.eval_shape(lambda: jax.random.key(0))
  plan = _plan(
    noise, key, testing.BATCH, mesh=mesh, in_shardings=(P(), P("data"))
  )
  assert plan.memory.inputs == {
    "key": 8,
    "batch": 4 * testing.ROWS * testing.WIDTH // 8,
  }


def test_devices_stay_in_the_order_of_the_mesh():
  devices = np.array(jax.devices()).reshape(2, 4)[:, ::-1]
  mesh = jax.sharding.Mesh(
    devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
  )
  shape = meshes.parse(mesh, targets.parse("cpu:8"))
  assert shape.order == (3, 2, 1, 0, 7, 6, 5, 4)
  assert (shape.make(jax.devices()).devices == devices).all()
  # Its ids are those of CPU devices, so they mean nothing for GPUs.
  assert meshes.parse(mesh, targets.parse("h200:1x8")).order is None


def test_axes_between_hosts_are_the_slow_part_of_an_axis():
  shape = meshes.parse(
    {"data": 2, "dcn.data": 2, "fsdp": 4}, targets.parse("h200:2x8")
  )
  assert (shape.names, shape.sizes) == (("data", "fsdp"), (4, 4))
  assert shape.between == ["data"]

  class Device:
    def __init__(self, i):
      self.id, self.process_index, self.platform = i, i // 8, "gpu"
      self.device_kind, self.slice_index = "H200", i // 8

    def __repr__(self):
      return str(self.id)

  array = shape.make_array([Device(i) for i in range(16)])
  hosts = np.vectorize(lambda device: device.process_index)(array)
  np.testing.assert_array_equal(hosts, np.repeat([0, 1], 8).reshape(4, 4))


def _offloads(weights, batch):
  policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
  )

  @functools.partial(jax.checkpoint, policy=policy)
  def body(x, weight):
    return jnp.tanh(checkpoint_name(x @ weight, "hidden")), None

  def loss(weights):
    return jax.lax.scan(body, batch, jnp.stack(weights))[0].sum()

  return jax.grad(loss)(weights)


def test_a_plan_prints_as_a_report():
  plan = function_plan.plan(
    testing.step,
    testing.WEIGHTS,
    testing.BATCH,
    target="cpu:8",
    mesh={"fsdp": 8},
    in_shardings=(P("fsdp"), P("fsdp")),
    donate="weights",
    batch_shape=(testing.ROWS, 1),
  )
  text = str(plan)
  assert text.startswith("plan: step on cpu:8\n")
  assert re.search(r"weights\[0\] +2\.00 KiB\n", text)
  assert "8 CPU devices, mesh fsdp=8" in text
  # As any plan, it is stored and read.
  stored = result.to_json((plan,))
  assert result.from_json(stored)[0].memory == plan.memory


def test_without_a_compiler_the_sizes_are_known(monkeypatch):
  monkeypatch.setattr(
    function_plan.topology, "missing", lambda target: ("libtpu",)
  )
  plan = function_plan.plan(
    testing.step,
    testing.WEIGHTS,
    testing.BATCH,
    target="v5e:2x4",
    mesh={"fsdp": 8},
    in_shardings=(P("fsdp"), P("fsdp")),
  )
  assert not plan.compiled
  assert plan.memory.state_and_batch == (
    4 * (testing.LAYERS * testing.WIDTH**2 + testing.ROWS * testing.WIDTH) // 8
  )
  assert plan.flops.hardware == testing.FLOPS
  assert plan.notes[0] == (
    "Nothing was compiled. The compiler for v5e:2x4 needs libtpu: pip install"
    " libtpu."
  )
  with pytest.raises(user_error.UserError, match="pip install libtpu"):
    function_plan.devices("v5e:2x4")
  with pytest.raises(user_error.UserError, match="target=h9:1x8 is not a targ"):
    function_plan.devices("h9:1x8")


# The compiler for CUDA is there always.
def test_a_step_is_compiled_for_absent_gpus():
  specs = P("fsdp"), P(("data", "fsdp"))
  plan = function_plan.plan(
    testing.step,
    testing.WEIGHTS,
    testing.BATCH,
    target=plan_testing.target("h200:2x8").text,
    mesh={"dcn.data": 2, "fsdp": 8},
    in_shardings=specs,
    donate=0,
  )
  assert plan.compiled
  assert plan.fit == "fits"
  assert plan.memory.arguments == 4 * (
    testing.LAYERS * testing.WIDTH**2 // 8 + testing.ROWS * testing.WIDTH // 16
  )
  links = {(c.axes, c.link) for c in plan.collectives}
  assert (("fsdp",), "fast") in links
  assert (("data",), "network") in links
  assert plan.estimate is not None


@pytest.mark.nightly
def test_offloaded_activations_are_not_in_the_memory_of_a_device():
  batch = jax.ShapeDtypeStruct((8192, testing.WIDTH), jnp.bfloat16)
  weights = [
    jax.ShapeDtypeStruct((testing.WIDTH, testing.WIDTH), jnp.bfloat16)
  ] * 8
  plan = function_plan.plan(
    _offloads,
    weights,
    batch,
    target=plan_testing.target("h200:1x8").text,
    mesh={"data": 8},
    in_shardings=(P(), P("data")),
  )
  moved = 8 * 8192 // 8 * testing.WIDTH * 2
  assert plan.memory.host == moved
  assert plan.estimate is not None
  # There and back, over 16 lanes of PCIe 5.
  assert plan.estimate.step > 2 * moved / 64e9
  assert not any("do not include" in note for note in plan.notes)
