"""Tests for states of decoding: smaller ones that generate the same."""

import dataclasses

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.cpu import forms
from paxon.runner.generation import decoding_state, samples
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing

_F32, _BF16 = jnp.float32, jnp.bfloat16


def _session(num_devices=1, **knobs):
  job, _ = testing.make(num_layers=3, max_new_tokens=4, **knobs)
  devices = jax.devices()[:num_devices]
  return session_lib.open_session(job, devices=devices)


def _copy(state):
  return jax.tree.map(jnp.copy, state)


@pytest.mark.nightly
def test_a_bfloat16_model_generates_the_same_from_rounded_kernels():
  session = _session(num_devices=2, mesh="data=2", dtype="bfloat16")
  state = session.initial_state()
  expected = samples.draw(session, state)
  session, state = decoding_state.prepare(session, _copy(state))
  stack = state.variables["params"]["stack"]["layers"]["blocks_0"]
  assert stack["feed_forward"]["up"].dtype == _BF16
  assert stack["feed_forward_norm"]["scale"].dtype == _F32
  dtypes = {spec.name: spec.dtype for spec in jax.tree.leaves(session.specs)}
  assert dtypes["params/embedding/table"] == _BF16
  assert dtypes["params/final_norm/scale"] == _F32
  assert samples.draw(session, state) == expected


@pytest.mark.parametrize("debias", [False, True])
def test_averages_are_rounded_unless_debiasing_divides_them(debias):
  job, _ = testing.make(max_new_tokens=4, dtype="bfloat16", average_decay=0.9)
  learner = job.task.only_learner
  assert learner.average is not None
  average = dataclasses.replace(learner.average, debias=debias)
  learner = dataclasses.replace(learner, average=average)
  job = dataclasses.replace(
    job, task=dataclasses.replace(job.task, learner=learner)
  )
  session = session_lib.open_session(job, devices=jax.devices()[:1])
  specs = jax.tree.leaves(decoding_state.round_dtypes(session).state_specs)
  dtypes = {spec.name: spec.dtype for spec in specs}
  name = "params/embedding/table"
  assert dtypes[name] == _BF16
  assert dtypes[f"average/{name}"] == (_F32 if debias else _BF16)
  assert dtypes["average/params/final_norm/scale"] == _F32


def test_small_models_stay_stacked():
  session = _session()
  state = session.initial_state()
  session, same = decoding_state.prepare(session, state)
  assert "layers" in same.variables["params"]["stack"]


@pytest.fixture(name="separate_all")
def _separate_all(monkeypatch):
  monkeypatch.setattr(forms, "MIN_BYTES_TO_SEPARATE", 0)


@pytest.mark.nightly
@pytest.mark.usefixtures("separate_all")
def test_separate_layers_generate_the_same_from_the_same_memory():
  session = _session()
  state = session.initial_state()
  expected = samples.draw(session, state)
  given = state.variables["params"]["stack"]["layers"]["blocks_0"]
  session, separate = decoding_state.prepare(session, state)
  stack = separate.variables["params"]["stack"]
  assert set(stack) == {"layers_0", "layers_1", "layers_2"}
  whole, layer = (
    given["feed_forward"]["up"],
    stack["layers_1"]["feed_forward"]["up"],
  )
  first = whole.unsafe_buffer_pointer()
  assert first < layer.unsafe_buffer_pointer() < first + whole.nbytes
  for one, two in zip(samples.draw(session, separate), expected, strict=True):
    np.testing.assert_allclose(one.log_probs, two.log_probs, rtol=1e-5)
    assert one == dataclasses.replace(two, log_probs=one.log_probs)


@pytest.mark.nightly
@pytest.mark.usefixtures("separate_all")
def test_quantized_weights_generate_the_same_as_separate_layers():
  job = fdl.build(
    testing.TinyLm(
      quantization="int8:serve", num_layers=3, max_new_tokens=4
    ).job()
  )
  session = session_lib.open_session(job, devices=jax.devices()[:1])
  rng = np.random.default_rng(0)

  def fill(x):
    if x.dtype == jnp.int8:
      return jnp.asarray(rng.integers(-127, 128, x.shape), x.dtype)
    return x + jnp.asarray(rng.uniform(0, 0.02, x.shape), x.dtype)

  state = session.initial_state()
  values = {**state.variables, "served": None}
  values["served"] = jax.tree.map(fill, state.variables["served"])
  state = dataclasses.replace(state, variables=values)
  expected = samples.draw(session, state)
  assert len(set(expected[0].ids)) > 1
  session, separate = decoding_state.prepare(session, state)
  assert "params/stack/layers_2/feed_forward/up" in session.absent
  assert "layers_2" in separate.variables["served"]["stack"]
  for one, two in zip(samples.draw(session, separate), expected, strict=True):
    np.testing.assert_allclose(one.log_probs, two.log_probs, rtol=1e-4)
    assert one == dataclasses.replace(two, log_probs=one.log_probs)


@pytest.mark.usefixtures("separate_all")
def test_layers_on_several_devices_stay_stacked():
  session = _session(num_devices=2, mesh="data=2")
  state = session.initial_state()
  _, same = decoding_state.prepare(session, _copy(state))
  assert "layers" in same.variables["params"]["stack"]
