"""Tests for warm starts from real checkpoints."""

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import parameter_average
from paxon.runner import user_error
from paxon.runner.checkpoints import (
  checkpointer,
  stored_checkpoint,
  warm_start,
  warm_start_plan,
)
from paxon.runner.settings import training
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import variables

DECAY = 0.9
COUNT = 3


def _spec(name, shape, axes, dtype=jnp.float32):
  return variables.VariableSpec(
    name=name, shape=shape, dtype=jnp.dtype(dtype), axes=axes
  )


SOURCE = [
  _spec("step", (), (), jnp.int32),
  _spec("params/up", (8, 16), ("embed", "mlp")),
  _spec("params/bias", (16,), ("mlp",)),
  _spec("params/frozen", (4,), (None,)),
  _spec("average/count", (), (), jnp.int32),
  _spec("average/params/up", (8, 16), ("embed", "mlp")),
  _spec("average/params/bias", (16,), ("mlp",)),
]


def _arrays(count=COUNT):
  random = np.random.default_rng(0)
  arrays = {
    spec.name: jnp.asarray(random.normal(size=spec.shape), spec.dtype)
    for spec in SOURCE
  }
  return arrays | {"average/count": jnp.asarray(count, jnp.int32)}


def _save(run, count=COUNT, debias=None):
  arrays = _arrays(count)
  folder = epath.Path(run) / "checkpoints"
  with checkpointer.Checkpointer(folder) as checkpoints:
    checkpoints.save(7, list(arrays.values()), specs=SOURCE, data={})
  if debias is not None:
    average = "task.learner.average"
    (run / "config.txt").write_text(
      f"{average}.decay = {DECAY}\n{average}.debias = {debias}\n"
    )
  return {name: np.asarray(value) for name, value in arrays.items()}


def _read(run, targets, *, mesh="fsdp=4,tensor=2", **fields):
  layout = layouts.Layout(meshes.make_mesh(meshes.MeshSpec.parse(mesh)))
  plan = warm_start_plan.make(
    training.WarmStart(checkpoint="base", **fields),
    checkpoint=stored_checkpoint.find_checkpoint(epath.Path(run)),
    targets=targets,
  )
  shardings = {spec.name: layout.sharding(spec.axes) for spec in targets}
  values = warm_start.read(plan, shardings=shardings)
  for name, value in values.items():
    assert value.sharding == shardings[name]
  return values


def test_values_have_the_target_shardings(tmp_path):
  saved = _save(tmp_path)
  values = _read(tmp_path, SOURCE[1:3])
  assert set(values) == {"params/up", "params/bias"}
  for name, value in values.items():
    np.testing.assert_array_equal(value, saved[name])


def test_one_source_fills_two_targets_with_copies(tmp_path):
  saved = _save(tmp_path)
  targets = [
    _spec("params/a", (16,), ("mlp",)),
    _spec("params/b", (16,), ("mlp",)),
    _spec("params/c", (16,), (None,)),
  ]
  values = _read(tmp_path, targets, patterns=((r"params/.", "params/bias"),))
  assert set(values) == {"params/a", "params/b", "params/c"}
  jax.jit(lambda x: -x, donate_argnums=0)(values.pop("params/a"))
  for value in values.values():
    np.testing.assert_array_equal(value, saved["params/bias"])


@pytest.mark.parametrize("repeated", [False, True])
def test_entries_of_a_stack(tmp_path, repeated):
  saved = _save(tmp_path)
  shape, names = ((2, 4, 16), ("layers", "experts", "mlp"))
  if not repeated:
    shape, names = (2, 16), ("layers", "mlp")
  targets = [
    _spec("params/tail", shape[1:], names[1:]),
    _spec("params/odd", shape, names),
  ]
  values = _read(
    tmp_path,
    targets,
    patterns=(
      (r"params/tail", "params/up[-1]"),
      (r"params/odd", "params/up[1:6:4]"),
    ),
    repeated_axes=("experts",) if repeated else (),
  )
  odd, tail = saved["params/up"][1:6:4], saved["params/up"][-1]
  if repeated:
    odd, tail = odd[:, None], tail[None]
  np.testing.assert_array_equal(
    values["params/odd"], np.broadcast_to(odd, shape)
  )
  np.testing.assert_array_equal(
    values["params/tail"], np.broadcast_to(tail, shape[1:])
  )


def test_averages_are_repeated(tmp_path):
  saved = _save(tmp_path, debias=False)
  target = _spec("params/up", (4, 8, 16), ("experts", "embed", "mlp"))
  values = _read(tmp_path, [target], averaged=True, repeated_axes=("experts",))
  np.testing.assert_allclose(
    values["params/up"],
    np.broadcast_to(saved["average/params/up"], (4, 8, 16)),
    rtol=1e-6,
  )


def test_a_cast_rounds_to_the_nearest(tmp_path):
  saved = _save(tmp_path)
  target = _spec("params/up", (8, 16), ("embed", "mlp"), jnp.bfloat16)
  values = _read(tmp_path, [target], cast=True)
  assert values["params/up"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(
    values["params/up"], saved["params/up"].astype(jnp.bfloat16)
  )


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_averages_are_those_of_evaluation(tmp_path, debias, dtype):
  saved = _save(tmp_path, debias=debias)
  targets = [
    _spec("params/up", (8, 16), ("embed", "mlp"), dtype),
    _spec("params/frozen", (4,), (None,), dtype),
  ]
  values = _read(tmp_path, targets, averaged=True, cast=True)
  share = 1 - np.float64(DECAY) ** COUNT if debias else 1.0
  np.testing.assert_allclose(
    np.asarray(values["params/up"], np.float64),
    saved["average/params/up"].astype(np.float64) / share,
    rtol=1e-6 if dtype == jnp.float32 else 4e-3,
  )
  assert values["params/up"].dtype == dtype
  # It has no average, so it is itself.
  np.testing.assert_array_equal(
    values["params/frozen"], saved["params/frozen"].astype(dtype)
  )


def test_before_the_first_update_a_debiased_average_is_the_parameters(tmp_path):
  saved = _save(tmp_path, count=0, debias=True)
  values = _read(tmp_path, SOURCE[1:2], averaged=True)
  np.testing.assert_array_equal(values["params/up"], saved["params/up"])


def test_averages_agree_with_the_learners(tmp_path):
  saved = _save(tmp_path, debias=True)
  average = parameter_average.ParameterAverage(decay=DECAY, debias=True)
  expected = average.values(
    parameter_average.AverageState(
      count=jnp.asarray(COUNT),
      average={"up": jnp.asarray(saved["average/params/up"])},
    ),
    {"up": jnp.asarray(saved["params/up"])},
  )
  values = _read(tmp_path, SOURCE[1:2], averaged=True)
  np.testing.assert_array_equal(values["params/up"], expected["up"])


def test_average_without_configuration_is_rejected(tmp_path):
  _save(tmp_path)
  with pytest.raises(
    user_error.UserError, match=r"averaged .* are unknown: .*config\.txt"
  ):
    _read(tmp_path, SOURCE[1:2], averaged=True)


def test_only_requested_arrays_are_read(tmp_path, monkeypatch):
  _save(tmp_path)
  asked = []
  read = stored_checkpoint.read_arrays
  monkeypatch.setattr(
    stored_checkpoint,
    "read_arrays",
    lambda checkpoint, wanted: (
      asked.append(set(wanted)) or read(checkpoint, wanted)
    ),
  )
  _read(tmp_path, SOURCE[:3])
  assert asked == [{"params/up", "params/bias"}]


def test_damaged_source_is_named(tmp_path):
  _save(tmp_path)
  state = tmp_path / "checkpoints" / "7" / "state"
  for file in state.rglob("*"):
    if file.is_file() and file.parent.name == "d":
      file.write_bytes(file.read_bytes()[:10])
  with pytest.raises(
    user_error.UserError,
    match=r"checkpoints/7 .*choose another WarmStart\.step",
  ):
    _read(tmp_path, SOURCE[1:2])


def test_whole_arrays_are_read_into_host_memory(tmp_path):
  saved = _save(tmp_path)
  checkpoint = stored_checkpoint.find_checkpoint(epath.Path(tmp_path))
  read = stored_checkpoint.read_numpy(checkpoint, ["params/bias", "step"])
  assert set(read) == {"params/bias", "step"}
  for name, value in read.items():
    assert isinstance(value, np.ndarray)
    np.testing.assert_array_equal(value, saved[name])
  assert stored_checkpoint.read_numpy(checkpoint, []) == {}
