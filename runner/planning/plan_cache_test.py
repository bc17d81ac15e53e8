"""Tests for the cache of plans and for what its keys depend on."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import sys
import types

import fiddle as fdl
import numpy as np
import pytest

from paxon.runner.plan import result, sample_plan
from paxon.runner.plan import target as targets
from paxon.runner.planning import job_lint, plan_cache
from paxon.runner.training import testing

_CPU = targets.parse("cpu:8")


@pytest.fixture(scope="module", name="shapes")
def _shapes_of_tiny():
  return job_lint.get_shapes(fdl.build(testing.make()[1]))


def _key(shapes, *, target=_CPU, environ=None, options=None, **knobs):
  return plan_cache.make_key(
    testing.make(**knobs)[1],
    target,
    shapes=shapes,
    environ=environ or {},
    **{"is_compiled": True} | (options or {}),
  )


def test_a_key_depends_on_what_a_plan_depends_on(shapes, tmp_path):
  file = tmp_path / "options.json"
  file.write_text("1")
  longer = {"inputs": ((8, 17), np.dtype("int32"))}
  variables = {"PAXON_OPTIONS": str(file)}
  keys = [
    _key(shapes),
    _key(shapes, global_batch_size=16),
    _key(shapes, target=targets.parse("cpu:4")),
    _key(shapes, options={"is_compiled": False}),
    _key(shapes, options={"others": ("a.B",)}),
    _key(shapes, environ={"XLA_FLAGS": "--xla_a=1"}),
    _key(shapes, environ=variables),
    # Data on disk that sets a shape.
    _key(dataclasses.replace(shapes, batch=longer)),
  ]
  file.write_text("2")
  keys.append(_key(shapes, environ=variables))
  assert len(set(keys)) == len(keys)
  others = {"HOME": "/a", plan_cache.CACHE_VARIABLE: "/b"}
  assert _key(shapes, environ=others) == keys[0]


@pytest.mark.parametrize(
  "name", ["layers/feed_forward.py", "runner/planning/plan_cache.py"]
)
def test_a_changed_source_changes_the_key(monkeypatch, shapes, name):
  before = _key(shapes)
  changed = pathlib.Path(plan_cache.__file__).parents[2] / name
  assert changed.exists()
  read = pathlib.Path.read_bytes

  def read_bytes(path):
    return read(path) + (b"# More.\n" if path == changed else b"")

  monkeypatch.setattr(pathlib.Path, "read_bytes", read_bytes)
  assert _key(shapes) != before


def test_tests_are_no_sources(tmp_path):
  (tmp_path / "layers").mkdir()
  before = plan_cache.digest_sources(tmp_path)
  (tmp_path / "layers" / "norm_test.py").write_text("x = 1\n")
  assert plan_cache.digest_sources(tmp_path) == before
  (tmp_path / "layers" / "norm.py").write_text("x = 1\n")
  assert plan_cache.digest_sources(tmp_path) != before


def test_modules_of_the_user_are_read_and_installed_ones_are_not(
  monkeypatch, tmp_path
):
  for name in ("mine", "site"):
    file = tmp_path / name / f"{name}_layer.py"
    file.parent.mkdir()
    file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(file.parent))
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, file.stem, module)
  (tmp_path / "site" / "site_layer-1.0.dist-info").mkdir()
  empty = tmp_path / "paxon"
  empty.mkdir()

  before = plan_cache.digest_sources(empty)
  (tmp_path / "site" / "site_layer.py").write_text("x = 2\n")
  assert plan_cache.digest_sources(empty) == before
  (tmp_path / "mine" / "mine_layer.py").write_text("x = 2\n")
  assert plan_cache.digest_sources(empty) != before


def test_an_installation_over_the_same_version_changes_the_key(
  monkeypatch, shapes, tmp_path
):
  info = tmp_path / "jaxlib-1.0.dist-info"
  info.mkdir()
  (info / "METADATA").write_text("Name: jaxlib\nVersion: 1.0\n")
  monkeypatch.setattr(
    importlib.metadata,
    "distributions",
    lambda: [importlib.metadata.PathDistribution(info)],
  )
  keys = set()
  for record in ("a.py,sha256=1,5\n", "a.py,sha256=2,5\n"):
    (info / "RECORD").write_text(record)
    keys.add(_key(shapes))
  assert len(keys) == 2


@pytest.mark.parametrize(
  ("environ", "place"),
  [
    ({"PAXON_CACHE_DIR": "/a", "HOME": "/h"}, "/a/plans"),
    ({"PAXON_CACHE_DIR": "a", "BUILD_WORKING_DIRECTORY": "/b"}, "/b/a/plans"),
    ({"PAXON_CACHE_DIR": "off", "HOME": "/h"}, None),
    ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/paxon/plans"),
    ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/paxon/plans"),
    ({"PAXON_CACHE_DIR": "", "HOME": "/h"}, "/h/.cache/paxon/plans"),
    ({}, None),
  ],
)
def test_where_plans_are_kept(environ, place):
  found = plan_cache.folder(environ)
  assert found == (None if place is None else pathlib.Path(place))


def _run(folder, key="k" * 64, **fields):
  """Returns the plan, and whether it was made."""
  made = []

  def make():
    made.append(1)
    return sample_plan.plan(made_at="", **fields)

  environ = {"PAXON_CACHE_DIR": os.fspath(folder)}
  plan = plan_cache.plan(make, find_key=lambda: key, environ=environ)
  return plan, bool(made)


def test_a_plan_is_made_once(tmp_path):
  first, was_made = _run(tmp_path)
  assert was_made
  assert first.made_at.startswith("20")
  assert not first.is_from_cache
  again, was_made = _run(tmp_path, fit="unknown")
  assert not was_made
  assert again == dataclasses.replace(first, is_from_cache=True)
  other, was_made = _run(tmp_path, key="o" * 64)
  assert was_made
  assert not other.is_from_cache


@pytest.mark.parametrize(
  "damage",
  [
    pytest.param(lambda text: text[: len(text) // 2], id="half"),
    pytest.param(lambda text: "", id="empty"),
    pytest.param(lambda text: "[]", id="list"),
    pytest.param(lambda text: "{}", id="nothing"),
    pytest.param(lambda text: "\udcff", id="no text"),
    pytest.param(lambda text: text.replace("k" * 64, "o" * 64), id="foreign"),
    pytest.param(lambda text: text.replace("tasks.a", "tasks.b"), id="changed"),
    pytest.param(
      lambda text: text.replace(
        f'\\"version\\": {result.VERSION}', '\\"version\\": 1'
      ),
      id="older",
    ),
  ],
)
def test_an_entry_that_is_not_sound_is_made_again(tmp_path, damage):
  _run(tmp_path)
  (entry,) = (tmp_path / "plans").iterdir()
  text = entry.read_text()
  assert damage(text) != text
  entry.write_bytes(damage(text).encode(errors="surrogateescape"))
  plan, was_made = _run(tmp_path)
  assert was_made
  assert plan.experiment == "tasks.a.B"
  assert not _run(tmp_path)[1]


def test_an_entry_of_another_form_is_made_again(tmp_path):
  # Its digest is right, but its plan has fields that this version has not.
  plan = json.dumps({"version": result.VERSION, "plans": [{"a": 1}]})
  key = "k" * 64
  (tmp_path / "plans").mkdir()
  (tmp_path / "plans" / f"{key}.json").write_text(
    json.dumps({"key": key, "digest": plan_cache.digest(plan), "plan": plan})
  )
  assert _run(tmp_path, key)[1]


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path):
  (tmp_path / "plans").write_text("a file is in the way")
  for _ in range(2):
    assert _run(tmp_path)[1]
  assert [path.name for path in tmp_path.iterdir()] == ["plans"]


def test_a_plan_of_sources_that_were_edited_meanwhile_is_not_kept(tmp_path):
  keys = iter(["before", "after"])
  environ = {"PAXON_CACHE_DIR": os.fspath(tmp_path)}
  plan_cache.plan(
    sample_plan.plan, find_key=lambda: next(keys), environ=environ
  )
  assert list(tmp_path.iterdir()) == []


def test_nothing_is_kept_without_a_key_or_when_it_is_off(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for _ in range(2):
    assert _run(tmp_path, key=None)[1]
    assert _run("off")[1]
  assert list(tmp_path.iterdir()) == []


def test_the_oldest_go_first(tmp_path, monkeypatch):
  monkeypatch.setattr(plan_cache, "_MAX_FILES", 2)
  for i in range(3):
    _run(tmp_path, key=f"{i}")
    os.utime(tmp_path / "plans" / f"{i}.json", (i, i))
  _run(tmp_path, key="3")
  names = {path.name for path in (tmp_path / "plans").iterdir()}
  assert names == {"2.json", "3.json"}
