"""Tests for `mesh="auto"`."""

import dataclasses
import re
import types

from etils import epath
import jax
import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import sample_plan, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import child, run_mesh
from paxon.runner.session import run_files
from paxon.runner.training import testing

_TINY = "runner.training.testing.TinyLm"


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory, monkeypatch):
  folder = tmp_path_factory.mktemp("cache")
  monkeypatch.setenv("PAXON_CACHE_DIR", str(folder))


def _choose(target, **knobs):
  job, _ = testing.make(mesh="auto", **knobs)
  given = tuple(
    overrides_lib.Override(name, str(value)) for name, value in knobs.items()
  )
  return run_mesh.choose(
    job, experiment=_TINY, overrides=given, target=targets.parse(target)
  )


def test_cpu_devices_get_the_mesh_that_sends_least():
  # Gradients are reduced, which is less than gathering weights twice.
  choice = _choose("cpu:8", global_batch_size=16)
  assert choice.mesh == "data=8"
  assert re.fullmatch(
    r"mesh=auto: data=8, the first of \d+ meshes by analytical estimate",
    choice.line,
  )
  assert _choose("cpu:1").line.startswith("mesh=auto: one device, the first")


@pytest.mark.parametrize("rules", ["fsdp", "data", "expert"])
def test_an_axis_that_splits_no_work_is_not_chosen(rules):
  # These rules split nothing by tensor, so it would send nothing at all.
  choice = _choose("cpu:8", global_batch_size=16, rules=rules)
  assert choice.mesh in ("data=8", "fsdp=8")
  # Sequences for four devices only, and no other axis has work for the rest.
  with pytest.raises(user_error.UserError, match="of cpu:8 divides the job"):
    _choose("cpu:8", global_batch_size=4, rules=rules)


def test_without_a_compiler_the_state_and_the_estimate_decide(monkeypatch):
  # 19 GiB in all by float32 Adam.
  monkeypatch.setattr(topology, "missing", lambda target: ("a compiler",))
  choice = _choose("v5e:2x4", embed_dim=8192, num_layers=3, global_batch_size=8)
  assert "data=8" not in choice.mesh
  assert re.search(
    r"analytical estimate; its state takes [\d.]+ GiB of 15\.75 GiB a device,"
    r" and nothing was compiled",
    choice.reason,
  )


def test_errors_where_nothing_fits_or_divides():
  with pytest.raises(
    user_error.UserError,
    match=r"mesh=auto: the state fits in none of \d+ meshes of v5e:2x4: it"
    r" takes at least .* GiB of 15\.75 GiB a device; The state takes .* TiB;"
    r" sharded .* At least \d+ such devices hold it",
  ):
    _choose("v5e:2x4", embed_dim=65536, num_layers=16)
  with pytest.raises(
    user_error.UserError,
    match=r"no mesh of cpu:7 divides the job; .* global_batch_size \(8\) that"
    r" is a multiple of 7",
  ):
    _choose("cpu:7")


def _with_compiler(monkeypatch, peaks):
  """Lets `peaks` of a mesh decide; returns the meshes that are compiled."""
  asked = []

  def plan(experiment, given, target, **options):
    mesh = given[-1].text
    asked.append(mesh)
    found = sample_plan.plan()
    memory = dataclasses.replace(
      found.memory,
      peak=peaks(mesh),
      usable=target.hardware.usable_bytes,
      compiler_error=None,
    )
    return dataclasses.replace(found, memory=memory)

  monkeypatch.setattr(child, "plan", plan)
  monkeypatch.setattr(topology, "missing", lambda target: ())
  return asked


def test_with_a_compiler_it_decides(monkeypatch):
  asked = _with_compiler(
    monkeypatch, lambda mesh: (20 if mesh == "data=8" else 1) * 2**30
  )
  choice = _choose("v5e:2x4", global_batch_size=16)
  assert choice.mesh in asked
  assert choice.mesh != "data=8"
  assert re.search(r"the best of \d compiled of \d+ meshes:", choice.reason)
  # The plans are cached like any other.
  number = len(asked)
  assert _choose("v5e:2x4", global_batch_size=16) == choice
  assert len(asked) == number


def test_only_compiled_meshes_count_as_those_that_do_not_fit(monkeypatch):
  asked = _with_compiler(monkeypatch, lambda mesh: 20 * 2**30)
  with pytest.raises(
    user_error.UserError,
    match=r"none of the 4 meshes that were compiled for v5e:2x4, of \d+, fits:"
    r" the smallest needs 20\.00 GiB of 15\.75 GiB",
  ):
    _choose("v5e:2x4", global_batch_size=16)
  assert len(asked) == 4


def _store(folder, mesh, *, experiment=None, is_saved=True):
  """What a run leaves in its folder that has trained on a mesh."""
  run_files.store_settings(
    experiment or testing.TinyLm.import_path(),
    [overrides_lib.Override("mesh", mesh)],
    epath.Path(folder),
  )
  (folder / "checkpoints" / ("4" if is_saved else "4.tmp-1")).mkdir(
    parents=True
  )


def _of(folder, *overrides):
  job, _ = testing.make(mesh="auto", global_batch_size=16)
  return run_mesh.choose_for_run(
    job, experiment=_TINY, overrides=overrides, run_dir=epath.Path(folder)
  )


def test_a_run_that_goes_on_keeps_its_mesh(tmp_path):
  asked = overrides_lib.Override("mesh", "auto")
  _store(tmp_path, "fsdp=4,tensor=2")
  again = _of(tmp_path, asked)
  assert again.line == ("mesh=auto: fsdp=4,tensor=2, which this run has had")


@pytest.mark.parametrize(
  ("mesh", "left"),
  [
    # On other devices it is chosen anew.
    ("fsdp=3", {}),
    # Another job, and one that was perhaps of another size, chose these.
    ("fsdp=4,tensor=2", {"experiment": "shop.Other"}),
    ("fsdp=4,tensor=2", {"is_saved": False}),
  ],
  ids=["other-devices", "other-experiment", "no-checkpoint"],
)
def test_a_mesh_that_is_not_this_runs_is_chosen_anew(tmp_path, mesh, left):
  _store(tmp_path, mesh, **left)
  assert _of(tmp_path, overrides_lib.Override("mesh", "auto")).mesh == "data=8"


def test_a_choice_takes_the_place_of_what_was_asked_for(tmp_path):
  asked = overrides_lib.Override("mesh", "auto")
  first = _of(tmp_path, asked)
  assert first.mesh == "data=8"
  chosen = first.overrides((asked, overrides_lib.Override("seed", "1")))
  assert [str(each) for each in chosen][-1].endswith("mesh=data=8")
  assert len(chosen) == 2


def _devices(number, kind, shape=None, slices=1, processes=1):
  def device(i):
    per_slice = number // slices
    at = i % per_slice
    found = types.SimpleNamespace(
      device_kind=kind,
      slice_index=i // per_slice,
      process_index=i * processes // number,
    )
    if shape is not None:
      found.coords = (
        at % shape[0],
        at // shape[0] % shape[1],
        at // (shape[0] * shape[1]),
      )
    return found

  return [device(i) for i in range(number)]


@pytest.mark.parametrize(
  ("devices", "expected"),
  [
    (_devices(16, "NVIDIA H200", processes=2), "h200:2x8"),
    (_devices(4, "NVIDIA H200"), "h200:1x4"),
    # A process for each GPU; hosts are what JAX calls slices.
    (_devices(16, "NVIDIA H200", slices=2, processes=16), "h200:2x8"),
    (_devices(8, "TPU v5 lite", (2, 4, 1)), "v5e:2x4"),
    (_devices(128, "TPU v4", (4, 4, 4), 2), "v4:2x(4x4x4)"),
    (_devices(3, "some card"), "cpu:3"),
    # Of a host's GPUs there are never five.
    (_devices(5, "NVIDIA H200"), "cpu:5"),
    # No target has hosts of twelve or of four, or an uneven number on each.
    (_devices(12, "NVIDIA H100 80GB HBM3"), "cpu:12"),
    (_devices(16, "NVIDIA H200", slices=4, processes=4), "cpu:16"),
    (_devices(12, "NVIDIA H200", slices=5, processes=5), "cpu:12"),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_devices_as_a_target(devices, expected):
  # What is asked of devices are attributes alone.
  assert _target_of(devices) == expected


def _target_of(devices):
  return run_mesh.make_target(devices).text


def test_the_devices_here():
  assert _target_of(jax.devices()) == "cpu:8"


@pytest.mark.parametrize(
  ("mesh", "count", "expected"),
  [
    ("data=4", 2, "data=2"),
    ("data=2,fsdp=2", 2, "data=1,fsdp=2"),
    ("data=2,fsdp=4", 2, "data=1,fsdp=2"),
    ("fsdp=4,dcn.data=2", 4, "fsdp=4,dcn.data=1"),
    ("fsdp=4,dcn.data=3", 8, "fsdp=4,dcn.data=2"),
    ("data=2,tensor=2", 2, "data=1,tensor=2"),
  ],
)
def test_a_mesh_becomes_smaller_where_the_batch_is_split(mesh, count, expected):
  choice = run_mesh.fit(mesh, devices=jax.devices()[:count])
  assert choice.mesh == expected
  assert choice.line == (
    f"mesh={mesh}: {expected}, for the {count} devices that are left"
  )
  assert run_mesh.fit(expected, devices=jax.devices()[:count]) is None


def test_a_mesh_that_fits_or_cannot_is_not_changed():
  assert run_mesh.fit("data=-1", devices=jax.devices()[:3]) is None
  for mesh in ("tensor=4", "data=2,tensor=4"):
    with pytest.raises(user_error.UserError, match=r"needs exactly \d devices"):
      run_mesh.fit(mesh, devices=jax.devices()[:2])
