"""Tests for what is said of a job before it runs."""

import dataclasses

import pytest

from paxon.runner import user_error
from paxon.runner.training import preflight, testing
from paxon.runner.training import session as session_lib


def test_warns_of_arrays_that_a_mesh_does_not_shard():
  job, _ = testing.make()
  session = session_lib.open_session(dataclasses.replace(job, mesh="data=8"))
  assert preflight.warnings(session) == []
  rules = tuple(
    (logical, None if logical == "batch" else mesh_axes)
    for logical, mesh_axes in job.rules
  )
  job = dataclasses.replace(job, mesh="data=8", rules=rules)
  (warning,) = preflight.warnings(session_lib.open_session(job))
  assert "the mesh axis data=8 splits neither the batch nor any" in warning
  assert "add 'data' to the rule of 'batch'" in warning


def test_rejects_ids_of_another_tokenizer():
  job, _ = testing.make()
  session = session_lib.open_session(job)
  preflight.check(session)
  source = job.eval_inputs["validation"]
  source.required_vocab_size = lambda: 300
  with pytest.raises(
    user_error.UserError,
    match=r"'validation' has token ids up to 299, but the model's voc",
  ):
    preflight.check(session)
