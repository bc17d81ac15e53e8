"""Tests for the enumeration of meshes."""

import math

import pytest

from paxon.runner.plan import target as targets
from paxon.runner.planning import mesh_factors
from paxon.sharding import axes
from paxon.sharding import mesh as mesh_lib


def _texts(text, target, varied=(axes.DATA, axes.FSDP, axes.TENSOR)):
  spec = mesh_lib.MeshSpec.parse(text)
  return [
    str(mesh)
    for mesh in mesh_factors.meshes(
      spec, target=targets.parse(target), varied=varied
    )
  ]


def test_every_mesh_of_four_devices():
  assert sorted(_texts("data=-1", "h200:1x4")) == [
    "data=2,fsdp=2",
    "data=2,tensor=2",
    "data=4",
    "fsdp=2,tensor=2",
    "fsdp=4",
    "tensor=4",
  ]


@pytest.mark.parametrize("target", ["cpu:1", "h200:1x8", "cpu:12", "h200:64x8"])
def test_meshes_cover_the_devices_once(target):
  found = _texts("fsdp=-1", target)
  assert len(set(found)) == len(found)
  for text in found:
    spec = mesh_lib.MeshSpec.parse(text)
    number = targets.parse(target).num_devices
    assert math.prod(spec.resolve(number).ici.values()) == number
    assert spec.ici.get("tensor", 1) <= 16


def test_between_slices_are_data_and_fsdp():
  found = _texts("fsdp=4,dcn.data=2", "v4:2x(2x2x1)")
  assert all("dcn." in text and "dcn.tensor" not in text for text in found)
  assert {"fsdp=4,dcn.data=2", "tensor=4,dcn.fsdp=2"} <= set(found)


def test_other_axes_stay():
  found = _texts("sequence=2,data=-1", "h200:1x8")
  assert all("sequence=2" in text for text in found)
  assert {"data=4,sequence=2", "fsdp=2,sequence=2,tensor=2"} <= set(found)
