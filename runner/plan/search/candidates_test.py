"""Tests for candidates and meshes."""

import math

import numpy as np
import pytest

from paxon.runner.plan.search import candidates, meshes
from paxon.sharding import axes, rule_sets, rules, variables
from paxon.sharding import mesh as mesh_lib

_Kind = candidates.Kind


def _choice(kind, text):
  return candidates.Choice(
    kind=kind, assignments=(f"{kind.name.lower()}={text}",), words=f"do {text}"
  )


_SPACE = candidates.Space(
  remat=(_choice(_Kind.REMAT, "a"), _choice(_Kind.REMAT, "b")),
  microbatches=(_choice(_Kind.MICROBATCHES, "2"),),
  meshes=(_choice(_Kind.MESH, "fsdp=8"),),
  dtypes=(_choice(_Kind.DTYPE, "bfloat16"),),
)


def test_the_smallest_changes_come_first():
  written = [
    [",".join(c.assignments) for c in level] for level in _SPACE.levels()
  ]
  assert written == [
    ["remat=a", "remat=b", "microbatches=2", "mesh=fsdp=8"],
    ["dtype=bfloat16"],
    [
      "remat=a,microbatches=2",
      "remat=b,microbatches=2",
      "remat=a,mesh=fsdp=8",
      "remat=b,mesh=fsdp=8",
      "microbatches=2,mesh=fsdp=8",
    ],
    [
      "remat=a,dtype=bfloat16",
      "remat=b,dtype=bfloat16",
      "microbatches=2,dtype=bfloat16",
      "mesh=fsdp=8,dtype=bfloat16",
    ],
    [
      "remat=a,microbatches=2,mesh=fsdp=8",
      "remat=b,microbatches=2,mesh=fsdp=8",
    ],
    [
      "remat=a,microbatches=2,dtype=bfloat16",
      "remat=b,microbatches=2,dtype=bfloat16",
      "remat=a,mesh=fsdp=8,dtype=bfloat16",
      "remat=b,mesh=fsdp=8,dtype=bfloat16",
      "microbatches=2,mesh=fsdp=8,dtype=bfloat16",
    ],
  ]


def test_what_an_experiment_lacks_is_left_out():
  levels = list(candidates.Space(remat=_SPACE.remat).levels())
  assert [len(level) for level in levels] == [2, 0, 0, 0, 0, 0]


def test_words_and_overrides():
  candidate = candidates.Candidate((*_SPACE.remat[:1], *_SPACE.meshes))
  assert candidate.words == "do a and do fsdp=8"
  assert candidate.overrides == ("--fdl.remat=a", "--fdl.mesh=fsdp=8")
  assert candidate.of_kind(_Kind.MESH) is _SPACE.meshes[0]
  assert candidate.of_kind(_Kind.DTYPE) is None
  assert not candidate.changes_numbers
  assert candidates.Candidate(_SPACE.dtypes).changes_numbers
  assert candidates.Candidate().words == "change nothing"


def _texts(text, **options):
  spec = mesh_lib.MeshSpec.parse(text)
  return [str(mesh) for mesh in meshes.factorizations(spec, **options)]


def test_every_mesh_of_four_devices():
  assert sorted(_texts("data=-1", num_devices=4)) == [
    "data=2,fsdp=2",
    "data=2,tensor=2",
    "data=4",
    "fsdp=2,tensor=2",
    "fsdp=4",
    "tensor=4",
  ]


@pytest.mark.parametrize("number", [1, 8, 12, 64, 512])
def test_meshes_cover_the_devices_once(number):
  found = _texts("fsdp=-1", num_devices=number, max_tensor=4)
  assert len(set(found)) == len(found)
  for text in found:
    spec = mesh_lib.MeshSpec.parse(text)
    assert math.prod(meshes.sizes(spec, number).values()) == number
    assert spec.ici.get("tensor", 1) <= 4


def test_between_slices_lie_data_and_fsdp():
  found = _texts("fsdp=4,dcn.data=2", num_devices=8, num_slices=2)
  assert all("dcn." in text and "dcn.tensor" not in text for text in found)
  assert {"fsdp=4,dcn.data=2", "tensor=4,dcn.fsdp=2"} <= set(found)


def test_other_axes_stay():
  found = _texts("sequence=2,data=-1", num_devices=8)
  assert all("sequence=2" in text for text in found)
  assert {"data=4,sequence=2", "fsdp=2,sequence=2,tensor=2"} <= set(found)


def test_a_mesh_is_sound_if_the_lint_finds_no_error():
  spec = variables.VariableSpec(
    name="params/query",
    shape=(64, 6, 16),
    dtype=np.dtype("float32"),
    axes=(axes.EMBED, axes.HEADS, None),
  )

  def is_sound(text):
    return meshes.is_sound(
      meshes.sizes(mesh_lib.MeshSpec.parse(text), 8),
      specs=[spec],
      batch={"inputs": (16, 32)},
      rules=rules.DEFAULT_RULES,
    )

  assert is_sound("fsdp=8")
  assert is_sound("fsdp=4,tensor=2")
  assert not is_sound("tensor=8")  # Of six heads.
  # The rules of `rules=fsdp` split nothing by tensor, those of `tensor` do.
  for name, is_shared in (("fsdp", False), ("tensor", True)):
    sizes = meshes.sizes(mesh_lib.MeshSpec.parse("fsdp=4,tensor=2"), 8)
    given = rule_sets.named(name)
    assert meshes.shares_work(sizes, rules=given) is is_shared
    # An axis that is not shared out anew is idle in every mesh.
    kept = meshes.sizes(mesh_lib.MeshSpec.parse("fsdp=4,stage=2"), 8)
    assert meshes.shares_work(kept, rules=given)
  mesh = meshes.sizes(mesh_lib.MeshSpec.parse("data=2,fsdp=2,tensor=2"), 8)
  assert meshes.batch_shards(mesh, rules.DEFAULT_RULES) == 4
