"""Tests for samples that are drawn in another layout than training's."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from paxon.runner import knobs, user_error
from paxon.runner.generation import generation_program, samples
from paxon.runner.session import session as session_lib
from paxon.runner.training import preflight, testing
from paxon.sharding import rule_sets

_OTHER = {
  "decode_mesh": "fsdp=4,tensor=2",
  "decode_rules": "weight_stationary",
}


def _session(mesh="fsdp=8", **layout):
  job, _ = testing.make(mesh=mesh, num_layers=1, max_new_tokens=6, **layout)
  return session_lib.open_session(job)


@functools.cache
def _state():
  return jax.device_get(_session().initial_state())


def _drawn(session):
  state = jax.device_put(_state(), session.state_shardings)
  return samples.draw(session, state)


@pytest.mark.nightly
def test_another_layout_draws_the_same():
  expected = _drawn(_session())
  assert all(len(sample.ids) == 6 for sample in expected)
  session = _session(**_OTHER)
  assert session.job.decode_rules == rule_sets.find_rules("weight_stationary")
  for one, two in zip(_drawn(session), expected, strict=True):
    # Sums are in another order.
    np.testing.assert_allclose(one.log_probs, two.log_probs, rtol=1e-4)
    assert one == dataclasses.replace(two, log_probs=one.log_probs)
  # And it is another one, whose weights lie otherwise.
  text = session.layout.lower(generation_program.trace(session)).as_text()
  assert '"fsdp"=4' in text
  assert '"tensor"=2' in text
  assert '"fsdp"=8' not in text


_TEXTS = ("def ", "x", "return x = 1 + y")
_SAMPLES = {"num_samples": 4, "temperature": 1.5}


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  "knobs",
  [
    _SAMPLES,
    {"num_samples": 2, "beam_size": 4},
    {**_SAMPLES, "guidance_scale": 2.0, "negative_prompt": "y"},
    {**_SAMPLES, "rerank_every": 2, "rerank_samples": 2},
    {**_SAMPLES, "cache_stages": (2, 4), "suffixes": ("x", "def f")},
    {"best_end": True},
  ],
  ids=lambda knobs: "-".join(knobs),
)
def test_samples_of_a_prompt_are_those_of_one_device(knobs):
  """Samples share the cache of their prompt, which is split over devices."""
  found = []
  for mesh, count in (("data=1", 1), ("data=2,tensor=2", 4)):
    job, _ = testing.make(
      mesh=mesh, num_layers=1, max_new_tokens=6, prompts=_TEXTS, **knobs
    )
    devices = jax.devices()[:count]
    session = session_lib.open_session(job, devices=devices)
    found.append(_drawn(session))
  assert len(found[0]) == len(_TEXTS) * knobs.get("num_samples", 1)
  for one, two in zip(*found, strict=True):
    np.testing.assert_allclose(two.log_probs, one.log_probs, rtol=1e-4)
    assert one.ids == two.ids
    np.testing.assert_allclose(
      two.suffix_log_probs, one.suffix_log_probs, rtol=1e-4
    )


@pytest.mark.parametrize(
  ("mesh", "message"),
  [
    ("fsdp=3", r"Job.decode_mesh: The mesh 'fsdp=3' needs exactly 3 devices"),
    ("dcn.data=8", r"has dcn\.data=8, but a second mesh of the same devices"),
    ("tensor=8", r"Job.decode_mesh 'tensor=8': .*axis 'heads' of size 2 does"),
  ],
)
def test_rejects_a_decode_mesh_that_does_not_fit_before_training(mesh, message):
  with pytest.raises(user_error.UserError, match=message):
    preflight.check(_session(decode_mesh=mesh))


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({}, r"^Job.decode_rules: .*axis 'heads' of size 2 does"),
    (
      {"decode_mesh": "tensor=8"},
      r"^Job.decode_mesh 'tensor=8' and Job.decode_rules: .*'heads'",
    ),
  ],
)
def test_rules_that_do_not_fit_are_named(given, message):
  session = _session("tensor=8", rules="fsdp", decode_rules="tensor", **given)
  with pytest.raises(user_error.UserError, match=message):
    preflight.check(session)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("weights_stationary", "did you mean 'weight_stationary'"),
    ("", "there is no rule set ''"),
  ],
)
def test_rejects_an_unknown_rule_set(name, message):
  with pytest.raises(knobs.KnobError, match=message):
    testing.make(decode_rules=name)
