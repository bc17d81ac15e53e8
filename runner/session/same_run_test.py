"""Tests of the comparison of a run's processes."""

import json

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.hosts import agreement
from paxon.runner.session import same_run
from paxon.runner.training import testing

EXPERIMENT = "source of the experiment"


def test_facts_are_the_configuration_the_data_and_the_code(monkeypatch):
  facts = same_run.collect(*testing.make())
  assert facts["seed"] == "0"
  assert json.loads(facts["data of 'train'"])["batches"] == 0
  assert {"data of 'validation'", "jax", "Python"} <= facts.keys()
  # Of another seed the data differs too.
  other = same_run.collect(*testing.make(seed=1))
  names = {name for name in facts if facts[name] != other[name]}
  assert {"seed", "data of 'train'"} <= names
  assert EXPERIMENT not in names
  assert same_run.difference(facts, facts) is None
  text = same_run.difference(facts, other)
  assert text is not None
  assert text.endswith(", and process 0 has 0")
  nothing = {k: v for k, v in facts.items() if k != "jax"}
  assert same_run.difference(nothing, facts) == (
    f"jax {facts['jax']}, and process 0 has nothing"
  )
  # Another file of the same name is other code.
  monkeypatch.setattr(testing, "__file__", same_run.__file__)
  assert same_run.collect(*testing.make())[EXPERIMENT] != facts[EXPERIMENT]


def test_another_directory_is_an_error(tmp_path, monkeypatch):
  (tmp_path / "owner.json").write_text('{"id": "a"}')
  monkeypatch.setattr(agreement, "is_alone", lambda: False)
  monkeypatch.setattr(same_run, "_LOOK_SECONDS", 0.0)
  same_run.check_directory(epath.Path(tmp_path), "a")
  for text in ("{}", '{"id": "b"}', "{", "[]"):
    (tmp_path / "owner.json").write_text(text)
    with pytest.raises(user_error.UserError, match="one directory that all"):
      same_run.check_directory(epath.Path(tmp_path), "a")
  with pytest.raises(
    user_error.UserError,
    match="Process 1 does not see in /b what process 0 writes in /a; --job_log",
  ):
    same_run.report([("/a", True), ("/b", False)])
