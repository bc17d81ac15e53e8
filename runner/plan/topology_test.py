"""Tests for the choice of compilers and their devices."""

import importlib.util
import types

import jax
from jax.experimental import topologies
import pytest

from paxon.runner.plan import target, topology


def test_sets_what_each_compiler_needs():
  cpu = topology.environment(target.parse("cpu:4"))
  assert cpu["JAX_NUM_CPU_DEVICES"] == "4"
  gpu = topology.environment(target.parse("h200:1x8"))
  # Options go to each compilation, not to the process.
  assert "XLA_FLAGS" not in gpu
  for variables in (cpu, gpu, topology.environment(target.parse("v5e:2x2"))):
    # No plugin may look for hardware.
    assert variables["JAX_PLATFORMS"] == "cpu"
    assert variables["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
    assert variables["TPU_SKIP_MDS_QUERY"] == "1"
    # Dumps of buffers are written by a compiler only.
    assert variables["JAX_ENABLE_COMPILATION_CACHE"] == "false"


@pytest.mark.parametrize(
  ("text", "modules", "missing"),
  [
    ("cpu:8", (), ()),
    ("v5e:2x2", (), ("libtpu",)),
    ("v5e:2x2", ("libtpu",), ()),
    ("h200:1x1", (), ("jax-cuda13-plugin", "jax-cuda13-pjrt")),
    ("h200:1x1", ("jax_plugins.xla_cuda12",), ()),
  ],
)
def test_names_the_compiler_that_is_missing(
  monkeypatch, text, modules, missing
):
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name: name if name in modules else None
  )
  monkeypatch.setattr(topology.shutil, "which", lambda name: name)
  assert topology.missing(target.parse(text)) == missing


def test_needs_the_files_of_cudas_toolkit_from_somewhere(monkeypatch, tmp_path):
  monkeypatch.setattr(topology.shutil, "which", lambda name: None)
  monkeypatch.setattr(topology, "_TOOLKIT_FOLDER", tmp_path / "none")
  spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
  gpu = target.parse("h200:1x1")
  assert topology.missing(gpu) == ("nvidia-cuda-nvcc", "nvidia-nvvm")
  for file in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
    path = tmp_path / "cu13" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
  assert topology.missing(gpu) == ()


def test_a_toolkit_of_the_machine_suffices(monkeypatch, tmp_path):
  monkeypatch.setattr(topology.shutil, "which", lambda name: None)
  monkeypatch.setattr(topology, "_TOOLKIT_FOLDER", tmp_path)
  spec = types.SimpleNamespace(submodule_search_locations=[])
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
  (tmp_path / "bin").mkdir()
  (tmp_path / "bin" / "ptxas").touch()
  assert topology.missing(target.parse("h200:1x1")) == ()


def test_this_machine_stands_for_itself():
  cpu = target.parse("cpu:8")
  devices = topology.devices(cpu)
  assert devices == jax.devices()


def test_a_wrong_number_of_devices_is_an_error():
  with pytest.raises(ValueError, match=r"cpu:4 has 4 devices, but .* shows 8"):
    topology.devices(target.parse("cpu:4"))


def test_devices_that_are_no_chips_are_an_error(monkeypatch):
  # As a compiler without megacore shows them: both cores of each chip.
  asked = {}

  def show(**options):
    asked.update(options)
    return types.SimpleNamespace(devices=[object()] * 8)

  monkeypatch.setattr(topologies, "get_topology_desc", show)
  with pytest.raises(
    ValueError, match=r"v4:2x2x1 has 4 devices, but .* shows 8"
  ):
    topology.devices(target.parse("v4:2x2x1"))
  assert asked["chip_config_name"] == "megacore"
