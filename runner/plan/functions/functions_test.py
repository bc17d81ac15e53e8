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
from paxon.runner.plan import child_process, result
from paxon.runner.plan import target as targets
from paxon.runner.plan.functions import (
  function_plan,
  meshes,
  tracing,
  worker,
)

_WIDTH, _ROWS, _LAYERS = 64, 32, 3
_WEIGHTS = [jax.ShapeDtypeStruct((_WIDTH, _WIDTH), jnp.float32)] * _LAYERS
_BATCH = jax.ShapeDtypeStruct((_ROWS, _WIDTH), jnp.float32)
# Forward, and two in the backward pass but for the gradient of the batch.
_FLOPS = (3 * _LAYERS - 1) * 2 * _ROWS * _WIDTH**2


def _step(weights, batch):
  def loss(weights):
    x = batch
    for weight in weights:
      x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)

  gradients = jax.grad(loss)(weights)
  return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def _trace(function, *arguments, target="cpu:8", **options):
  given = {
    "mesh": None,
    "in_shardings": None,
    "donate": (),
    "batch_shape": None,
    "options": {},
  }
  return tracing.trace(
    function, arguments, target=targets.parse(target), **given | options
  )


def _plan(function, *arguments, **options):
  """Plans in this process, which has eight CPU devices."""
  request = _trace(function, *arguments, **options)
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
    _step,
    _WEIGHTS,
    _BATCH,
    mesh={"fsdp": 8},
    in_shardings=specs,
    donate="weights",
  )
  compiled = _compile(
    _step,
    _WEIGHTS,
    _BATCH,
    mesh=_make_mesh(fsdp=8),
    in_shardings=specs,
    donate=0,
  )
  _check_sizes(plan, compiled)
  assert plan.flops.hardware == _FLOPS
  assert plan.mesh == {"fsdp": 8}
  assert sum(plan.memory.inputs.values()) == plan.memory.state_and_batch
  assert plan.memory.state_and_batch == plan.memory.arguments


def test_settings_of_jit_are_kept():
  mesh = _make_mesh(data=2, fsdp=4)
  weights, batch = (
    NamedSharding(mesh, P("fsdp")),
    NamedSharding(mesh, P(("data", "fsdp"))),
  )
  jitted = jax.jit(_step, in_shardings=(weights, batch), donate_argnums=0)
  plan = _plan(jitted, _WEIGHTS, _BATCH)
  _check_sizes(plan, jitted.lower(_WEIGHTS, _BATCH).compile())
  assert plan.mesh == {"data": 2, "fsdp": 4}
  request = _trace(jitted, _WEIGHTS, _BATCH)
  assert request.donated == (0, 1, 2)
  assert request.labels == (
    "weights[0]",
    "weights[1]",
    "weights[2]",
    "batch",
  )
  # Given here, they win.
  other = _trace(jitted, _WEIGHTS, _BATCH, in_shardings=(P(), None))
  assert other.specs == (P(), P(), P(), P(("data", "fsdp")))


def _mapped(mesh):
  def block(weights, batch):
    return jax.lax.pmean(batch @ weights[0], "data")

  return jax.shard_map(
    block, mesh=mesh, in_specs=([P()] * _LAYERS, P("data")), out_specs=P()
  )


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function])
def test_arguments_of_mapped_functions_are_split_as_they_say(wrap):
  mesh = _make_mesh(data=8)
  request = _trace(wrap(_mapped(mesh)), _WEIGHTS, _BATCH, mesh=mesh)
  assert request.specs == (P(), P(), P(), P("data"))
  other = {"batch": 8}
  with pytest.raises(user_error.UserError, match=r"mesh: .* has a mesh that d"):
    _trace(wrap(_mapped(mesh)), _WEIGHTS, _BATCH, mesh=other)


def test_shardings_of_arrays_are_kept():
  sharding = NamedSharding(_make_mesh(fsdp=8), P("fsdp"))
  weights = [jax.device_put(jnp.zeros((_WIDTH, _WIDTH)), sharding)] * _LAYERS
  plan = _plan(_step, weights, _BATCH, donate=0)
  assert plan.memory.inputs == {
    **{f"weights[{i}]": 4 * _WIDTH**2 // 8 for i in range(_LAYERS)},
    "batch": 4 * _ROWS * _WIDTH,
  }
  assert {c.kind for c in plan.collectives} >= {"all-gather"}


class _Network(nnx.Module):
  def __init__(self, rngs):
    self.inner = nnx.Linear(_WIDTH, 2 * _WIDTH, use_bias=False, rngs=rngs)
    self.outer = nnx.Linear(2 * _WIDTH, _WIDTH, use_bias=False, rngs=rngs)

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
    _BATCH,
    mesh={"data": 8},
    in_shardings=(None, None, P("data")),
    donate=("network", "optimizer"),
  )
  # Without the update there would be no gradients: two matmuls.
  assert plan.flops.hardware == 5 * 2 * _ROWS * 2 * _WIDTH**2
  weights = 2 * 2 * _WIDTH**2 * 4
  assert plan.memory.inputs["network.inner"] == weights // 2
  assert plan.memory.inputs["optimizer.opt_state"] == weights
  assert plan.memory.peak < 2 * plan.memory.arguments
  (reduced,) = [c for c in plan.collectives if c.kind == "all-reduce"]
  assert reduced.payload_bytes == weights + 4  # Of the gradients and the loss.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Layer:
  """As equinox has them: a tree with leaves that are no arrays."""

  weight: jax.ShapeDtypeStruct
  activation: object
  scale: float
  bias: object = None


def test_leaves_that_are_no_arrays_are_constants():
  layer = _Layer(_WEIGHTS[0], jnp.tanh, 0.5)

  def apply(layer, batch):
    return layer.activation(batch @ layer.weight) * layer.scale

  request = _trace(
    apply,
    layer,
    _BATCH,
    mesh={"data": 8},
    in_shardings=(P(None, "data"), P("data")),
  )
  assert request.labels == ("layer.weight", "batch")
  assert request.specs == (P(None, "data"), P("data"))
  assert worker.plan(request).flops.hardware == 2 * _ROWS * _WIDTH**2


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
    _WEIGHTS[0],
    _BATCH,
    mesh={"data": 2, "tensor": -1},
    in_shardings=(P("tensor"), P("data", "tensor")),
  )
  assert plan.mesh == {"data": 2, "tensor": 4}
  (reduced,) = plan.collectives
  assert (reduced.kind, reduced.axes) == ("all-reduce", ("tensor",))
  assert reduced.payload_bytes == _ROWS // 2 * _WIDTH * 4


def test_explicit_axes_and_keys_of_random_numbers():
  mesh = jax.sharding.AbstractMesh(
    (8,), ("data",), axis_types=(AxisType.Explicit,)
  )

  def noise(key, batch):
    return batch + jax.random.normal(key, batch.shape, out_sharding=P("data"))

  key = jax.eval_shape(lambda: jax.random.key(0))
  plan = _plan(noise, key, _BATCH, mesh=mesh, in_shardings=(P(), P("data")))
  assert plan.memory.inputs == {"key": 8, "batch": 4 * _ROWS * _WIDTH // 8}


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


def _prints(weights, batch):
  out = batch @ weights[0]
  jax.debug.print("{}", out.sum())
  return out


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


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({}, r"mesh: h200:1x8 has 8 devices; give the size of each axis"),
    ({"mesh": {"data": 4}}, r"mesh: data=4 has 4 devices, but .* has 8; give"),
    ({"mesh": {"data": 0}}, r"mesh: the size of 'data' must be a positive"),
    ({"mesh": {"data": -1, "x": -1}}, r"only one size may be -1, but data and"),
    (
      {"mesh": {"data": 8}, "in_shardings": (P("fsdp"), P())},
      r"weights\[0\] with the shape \(64, 64\) cannot be sharded by .*'fsdp'",
    ),
    (
      {"mesh": {"data": 8}, "in_shardings": (P(), P(None, None, "data"))},
      r"batch with the shape \(32, 64\) cannot be sharded",
    ),
    (
      {"mesh": {"data": 8}, "in_shardings": (P(), P(), P())},
      r"in_shardings must be a prefix .*\(weights, batch\)",
    ),
    (
      {"mesh": {"data": 8}, "in_shardings": ("data", P())},
      r"in_shardings: 'data' must be a PartitionSpec",
    ),
    ({"mesh": {"data": 8}, "donate": 2}, r"donate: 2 is no argument; .*batch"),
    ({"mesh": {"data": 8}, "donate": "x"}, r"donate: 'x' is no argument"),
  ],
)
def test_wrong_settings_are_errors_of_the_user(options, message):
  with pytest.raises(user_error.UserError, match=message):
    _trace(_step, _WEIGHTS, _BATCH, target="h200:1x8", **options)


def test_what_cannot_be_compiled_without_a_device_is_named():
  mesh = {"data": 8}
  with pytest.raises(user_error.UserError, match=r"host .jax\.debug\.print"):
    _trace(_prints, _WEIGHTS, _BATCH, target="h200:1x8", mesh=mesh)
  with pytest.raises(user_error.UserError, match="have no array"):
    _trace(lambda x: x, 3.0, target="h200:1x8", mesh=mesh)
  inner = NamedSharding(_make_mesh(data=8), P("data"))

  def constrain(batch):
    return jax.lax.with_sharding_constraint(batch, inner)

  for target, mesh in (("h200:2x8", {"data": 16}), ("h200:1x1", None)):
    with pytest.raises(user_error.UserError, match="has a mesh of 8 devices"):
      _trace(constrain, _BATCH, target=target, mesh=mesh)


def test_a_plan_prints_as_a_report():
  plan = function_plan.plan(
    _step,
    _WEIGHTS,
    _BATCH,
    target="cpu:8",
    mesh={"fsdp": 8},
    in_shardings=(P("fsdp"), P("fsdp")),
    donate="weights",
    batch_shape=(_ROWS, 1),
  )
  text = str(plan)
  assert text.startswith("plan: _step on cpu:8\n")
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
    _step,
    _WEIGHTS,
    _BATCH,
    target="v5e:2x4",
    mesh={"fsdp": 8},
    in_shardings=(P("fsdp"), P("fsdp")),
  )
  assert not plan.compiled
  assert plan.memory.state_and_batch == (
    4 * (_LAYERS * _WIDTH**2 + _ROWS * _WIDTH) // 8
  )
  assert plan.flops.hardware == _FLOPS
  assert plan.notes[0] == (
    "Nothing was compiled. The compiler for v5e:2x4 needs libtpu: pip install"
    " libtpu."
  )
  with pytest.raises(user_error.UserError, match="pip install libtpu"):
    function_plan.devices("v5e:2x4")
  with pytest.raises(user_error.UserError, match="target=h9:1x8 is not a targ"):
    function_plan.devices("h9:1x8")


def test_errors_of_the_compiling_process_are_those_of_the_user():
  with pytest.raises(user_error.UserError, match="xla_no_such_option"):
    function_plan.plan(
      _step,
      _WEIGHTS,
      _BATCH,
      target="cpu:1",
      compiler_options={"xla_no_such_option": True},
    )
  assert child_process.count_parallel() >= 1


# The compiler for CUDA is there always.
def test_a_step_is_compiled_for_absent_gpus():
  specs = P("fsdp"), P(("data", "fsdp"))
  plan = function_plan.plan(
    _step,
    _WEIGHTS,
    _BATCH,
    target="h200:2x8",
    mesh={"dcn.data": 2, "fsdp": 8},
    in_shardings=specs,
    donate=0,
  )
  assert plan.compiled
  assert plan.fit == "fits"
  assert plan.memory.arguments == 4 * (
    _LAYERS * _WIDTH**2 // 8 + _ROWS * _WIDTH // 16
  )
  links = {(c.axes, c.link) for c in plan.collectives}
  assert (("fsdp",), "fast") in links
  assert (("data",), "network") in links
  assert plan.estimate is not None


@pytest.mark.nightly
def test_offloaded_activations_are_not_in_the_memory_of_a_device():
  batch = jax.ShapeDtypeStruct((8192, _WIDTH), jnp.bfloat16)
  weights = [jax.ShapeDtypeStruct((_WIDTH, _WIDTH), jnp.bfloat16)] * 8
  plan = function_plan.plan(
    _offloads,
    weights,
    batch,
    target="h200:1x8",
    mesh={"data": 8},
    in_shardings=(P(), P("data")),
  )
  moved = 8 * 8192 // 8 * _WIDTH * 2
  assert plan.memory.host == moved
  assert plan.estimate is not None
  # There and back, over 16 lanes of PCIe 5.
  assert plan.estimate.step > 2 * moved / 64e9
  assert not any("do not include" in note for note in plan.notes)
