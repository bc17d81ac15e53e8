"""Tests for checkpoints."""

import asyncio
import dataclasses
import subprocess
import sys
import types

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from paxon.runner.checkpoints import checkpointer, named_tree, orbax_output
from paxon.runner.settings import training
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import variables


def _spec(name, shape, axes=None, dtype=jnp.float32):
  return variables.VariableSpec(
    name=name,
    shape=shape,
    dtype=jnp.dtype(dtype),
    axes=axes or (None,) * len(shape),
  )


SPECS = {
  "step": _spec("step", (), dtype=jnp.int32),
  "params": {
    "up": _spec("params/up", (3, 8, 16), ("layers", "embed", "mlp")),
    "half": _spec("params/half", (8,), ("embed",), jnp.bfloat16),
  },
  "moments": (
    _spec("opt_state/mu/up", (3, 8, 16), ("layers", "embed", "mlp")),
  ),
}
MESHES = ("fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2", "data=8", "tensor=8")


def _layout(text):
  return layouts.Layout(meshes.make_mesh(meshes.MeshSpec.parse(text)))


def _tree(seed=0):
  random = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jnp.asarray(100 * random.normal(size=s.shape), s.dtype), SPECS
  )


def _placed(tree, layout):
  return jax.device_put(tree, layout.shardings(SPECS))


def _assert_equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert a.dtype == e.dtype
    np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("target", MESHES)
def test_restores_exactly_onto_another_mesh(tmp_path, target):
  tree = _tree()
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    checkpoints.save(
      5, _placed(tree, _layout(MESHES[0])), specs=SPECS, data={"at": [1, 2]}
    )
  shardings = _layout(target).shardings(SPECS)
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    assert checkpoints.latest_step() == 5
    restored = checkpoints.restore(5, specs=SPECS, shardings=shardings)
  _assert_equal(restored.tree, tree)
  assert (restored.data, restored.step) == ({"at": [1, 2]}, 5)
  placed = jax.tree.map(lambda x: x.sharding, restored.tree)
  assert placed == shardings


def test_buffers_may_be_donated_during_a_save(tmp_path):
  layout = _layout("fsdp=4,tensor=2")
  step = jax.jit(
    lambda tree: jax.tree.map(lambda x: -x - jnp.ones_like(x), tree),
    donate_argnums=0,
  )
  tree = _placed(_tree(), layout)
  expected = {}
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    for i in range(8):
      # A copy: on CPU `device_get` may be a view of the donated buffer.
      expected[i] = jax.tree.map(lambda x: np.array(x, copy=True), tree)
      checkpoints.save(i, tree, specs=SPECS, data={})
      for _ in range(5):
        tree = step(tree)
    checkpoints.wait()
    for i, values in expected.items():
      restored = checkpoints.restore(
        i, specs=SPECS, shardings=layout.shardings(SPECS)
      )
      _assert_equal(restored.tree, values)


@pytest.fixture(name="compiled")
def _compiled():
  """Counts the programs that are compiled."""
  events = []

  def listen(event, duration, **_):
    del duration
    if event == "/jax/core/compile/backend_compile_duration":
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield events
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("mesh", [*MESHES, "data=2,sequence=2,fsdp=2"])
def test_saving_replicated_arrays_compiles_nothing(tmp_path, compiled, mesh):
  jax.clear_caches()
  tree = _tree()
  placed = _placed(tree, _layout(mesh))
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    del compiled[:]
    checkpoints.save(1, placed, specs=SPECS, data={})
    assert not compiled
    checkpoints.wait()
    shardings = _layout(MESHES[0]).shardings(SPECS)
    restored = checkpoints.restore(1, specs=SPECS, shardings=shardings)
  _assert_equal(restored.tree, tree)


def test_large_replicated_arrays_are_written_by_several_devices(
  tmp_path, compiled
):
  specs = {"x": _spec("x", (16, 2**15))}
  tree = {"x": np.arange(2.0**19, dtype=np.float32).reshape(16, -1)}
  placed = jax.device_put(tree, _layout("data=8").shardings(specs))
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    del compiled[:]
    checkpoints.save(1, placed, specs=specs, data={})
    assert compiled
    checkpoints.wait()
    shardings = _layout("fsdp=8").shardings(specs)
    restored = checkpoints.restore(1, specs=specs, shardings=shardings)
  _assert_equal(restored.tree, tree)


def test_part_of_a_checkpoint_can_be_read(tmp_path):
  tree, layout = _tree(), _layout("fsdp=8")
  wanted = {"params": SPECS["params"]}
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    checkpoints.save(1, tree, specs=SPECS, data={})
    checkpoints.wait()
    restored = checkpoints.restore(
      1, specs=wanted, shardings=layout.shardings(wanted)
    )
  _assert_equal(restored.tree, {"params": tree["params"]})


def test_latest_checkpoints_are_kept(tmp_path):
  with checkpointer.Checkpointer(
    epath.Path(tmp_path), retention=training.Retention(newest=2)
  ) as checkpoints:
    for step in (1, 2, 10, 20):
      checkpoints.save(step, _tree(step), specs=SPECS, data={})
    checkpoints.wait()
    assert checkpoints.latest_step() == 20
  assert {path.name for path in tmp_path.iterdir()} == {"10", "20"}


def test_a_step_is_saved_once(tmp_path):
  layout = _layout("fsdp=8")
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    checkpoints.save(3, _tree(0), specs=SPECS, data={})
    checkpoints.save(3, _tree(1), specs=SPECS, data={})
    checkpoints.wait()
    restored = checkpoints.restore(
      3, specs=SPECS, shardings=layout.shardings(SPECS)
    )
  _assert_equal(restored.tree, _tree(0))


def test_incomplete_checkpoint_is_ignored_and_removed(tmp_path):
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    checkpoints.save(3, _tree(), specs=SPECS, data={})
  left = tmp_path / "4.orbax-checkpoint-tmp"
  (left / "state").mkdir(parents=True)
  with checkpointer.Checkpointer(
    epath.Path(tmp_path), read_only=True
  ) as checkpoints:
    assert checkpoints.latest_step() == 3
  assert left.exists()
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    assert checkpoints.latest_step() == 3
    checkpoints.save(4, _tree(), specs=SPECS, data={})
    checkpoints.wait()
    assert checkpoints.latest_step() == 4
  assert not left.exists()


def test_a_mismatch_names_the_variable_and_both_shapes(tmp_path):
  other = dataclasses.replace(SPECS["params"]["up"], shape=(3, 8, 32))
  specs = SPECS | {"params": SPECS["params"] | {"up": other}}
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    checkpoints.save(3, _tree(), specs=SPECS, data={})
    checkpoints.wait()
    with pytest.raises(
      named_tree.CheckpointMismatchError,
      match=r"/3 .* params/up has shape \(3, 8, 16\) in .* and \(3, 8, 32\)",
    ):
      checkpoints.restore(
        3, specs=specs, shardings=_layout("fsdp=8").shardings(specs)
      )


def test_reading_a_missing_folder(tmp_path):
  missing = epath.Path(tmp_path / "no")
  with checkpointer.Checkpointer(missing, read_only=True) as checkpoints:
    assert checkpoints.latest_step() is None
    with pytest.raises(ValueError, match=r"no is closed or read-only"):
      checkpoints.save(1, _tree(), specs=SPECS, data={})
    with pytest.raises(ValueError, match=r"no does not exist"):
      checkpoints.restore(1, specs=SPECS, shardings={})
  assert not missing.exists()


def test_read_only_directory_is_not_written(tmp_path):
  with (
    checkpointer.Checkpointer(
      epath.Path(tmp_path), read_only=True
    ) as checkpoints,
    pytest.raises(ValueError, match=r"is closed or read-only"),
  ):
    checkpoints.save(1, _tree(), specs=SPECS, data={})
  assert not list(tmp_path.iterdir())


def _saved(folder):
  layout = _layout("fsdp=8")
  with checkpointer.Checkpointer(folder) as checkpoints:
    checkpoints.save(1, _placed(_tree(), layout), specs=SPECS, data={})
  return layout


@pytest.mark.parametrize(
  ("name", "damage"),
  [
    ("metadata/metadata", "emptied"),
    ("metadata/metadata", "removed"),
    ("data/metadata", "emptied"),
    ("data/metadata", "removed"),
    ("state/_METADATA", "emptied"),
  ],
)
def test_damaged_checkpoint_is_named(tmp_path, name, damage):
  folder = epath.Path(tmp_path)
  layout = _saved(folder)
  if damage == "emptied":
    (folder / "1" / name).write_text("")
  else:
    (folder / "1" / name).unlink()
  with (
    checkpointer.Checkpointer(folder, read_only=True) as checkpoints,
    pytest.raises(checkpointer.DamagedCheckpointError, match=r"/1 is damaged"),
  ):
    checkpoints.restore(1, specs=SPECS, shardings=layout.shardings(SPECS))


def test_read_error_of_one_process_is_raised_by_all(tmp_path, monkeypatch):
  folder = epath.Path(tmp_path)
  layout = _saved(folder)
  told = []

  def gather(problem):
    told.append(problem)
    return [problem, "a problem of another process"]

  monkeypatch.setattr(checkpointer.agreement, "gather", gather)
  # It has a barrier, which one that fails does not reach.
  monkeypatch.delattr(checkpointer.ocp.CheckpointManager, "restore")
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:

    def restore():
      checkpoints.restore(1, specs=SPECS, shardings=layout.shardings(SPECS))

    with pytest.raises(checkpointer.DamagedCheckpointError, match="of another"):
      restore()
    assert told == [None]

    def fail(*args):
      raise OSError("no such shard")

    monkeypatch.setattr(checkpoints, "_read", fail)
    # The others hear of it before this process raises.
    with pytest.raises(
      checkpointer.DamagedCheckpointError,
      match=r"/1 is damaged: it cannot be read \(OSError: no such shard\)",
    ) as caught:
      restore()
    assert told == [None, str(caught.value)]


def test_failed_save_has_a_reason(tmp_path):
  folder = epath.Path(tmp_path) / "checkpoints"
  tree = _placed(_tree(), _layout("fsdp=8"))
  with checkpointer.Checkpointer(folder) as checkpoints:
    folder.rmdir()
    folder.write_text("a file where the folder was")

    def save():
      checkpoints.save(1, tree, specs=SPECS, data={})
      checkpoints.wait()

    with pytest.raises(
      checkpointer.SaveError, match=r"Writing .* to .*check.* failed:"
    ):
      save()


@pytest.mark.parametrize(
  ("error", "processes", "raised"),
  [
    (ValueError("UNKNOWN: Gloo AllGather failed: ..."), 2, ValueError),
    (jax.errors.JaxRuntimeError("Barrier timed out"), 2, None),
    (ValueError("PERMISSION_DENIED: ..."), 2, checkpointer.SaveError),
    (ValueError("no gloo, but failed"), 1, checkpointer.SaveError),
  ],
)
def test_a_lost_process_is_no_failed_save(
  tmp_path, monkeypatch, error, processes, raised
):
  def fail(*args, **kwargs):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    raise error

  tree = _placed(_tree(), _layout("fsdp=8"))
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    with pytest.raises(raised or type(error)) as caught:
      checkpoints.save(1, tree, specs=SPECS, data={})
  assert type(caught.value) is (raised or type(error))


def test_late_errors_of_writes_are_dropped(monkeypatch):
  printed = []
  monkeypatch.setattr(sys, "unraisablehook", printed.append)
  restore = orbax_output.filter_output()
  loop = asyncio.new_event_loop()
  loop.close()
  with pytest.raises(RuntimeError, match="loop is closed") as caught:
    loop.call_soon_threadsafe(print)
  frames = caught.value.__traceback__

  def report(error, frames):
    sys.unraisablehook(
      types.SimpleNamespace(exc_value=error, exc_traceback=frames)
    )

  # As TensorStore's threads call it: without a frame of this file.
  report(caught.value, frames.tb_next)
  assert not printed
  report(caught.value, frames)
  report(KeyError("a"), frames.tb_next)
  report(KeyError("a"), None)
  assert len(printed) == 3
  restore()
  report(caught.value, frames.tb_next)
  assert len(printed) == 4


def test_opening_read_only_logs_nothing(tmp_path, caplog):
  _saved(epath.Path(tmp_path))
  caplog.clear()
  with checkpointer.Checkpointer(epath.Path(tmp_path), read_only=True):
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_does_not_import_tensorflow():
  program = (
    "import sys; from paxon.runner.checkpoints import checkpointer;"
    "assert 'tensorflow' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", program], check=True)
