"""Tests for states of decoding: smaller ones that generate the same."""

import dataclasses

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.generation import decoding_state, samples
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing

_F32, _BF16 = jnp.float32, jnp.bfloat16


def _rounds(x):
  return x.astype(_BF16) * 2


def _twice(x):
  return _rounds(x), x.astype(_BF16)


def _also_wide(x):
  return _rounds(x), x.sum()


def _two_dtypes(x):
  return _rounds(x), x.astype(jnp.float16)


def _sliced(x):
  row = jax.lax.dynamic_index_in_dim(x, jnp.int32(1), keepdims=False)
  return row.T.reshape(-1).astype(_BF16), x[jnp.arange(2)].astype(_BF16)


def _index(x):
  return jnp.arange(9.0)[x.astype(jnp.int32)]


def _in_loops(x):
  def body(i, y):
    each = jax.lax.scan(lambda y, row: (y + row.astype(_BF16), None), y, x)[0]
    return each + x[i].astype(_BF16)

  return jax.lax.fori_loop(0, 2, body, jnp.zeros((3,), _BF16))


def _carried(x):
  def body(y, _):
    return y + 1, y.astype(_BF16)

  return jax.lax.scan(body, x, None, length=2)[1]


def _carried_by_while(x):
  return jax.lax.while_loop(lambda y: y.sum() > 0, lambda y: y - 1, x)


def _becomes_carried(x):
  def body(y, _):
    return x, y.astype(_BF16)

  return jax.lax.scan(body, jnp.zeros_like(x), None, length=2)[1]


def _in_branches(x):
  one = lambda x: x.astype(_BF16)  # noqa: E731
  two = lambda x: x.astype(_BF16) + 1  # noqa: E731
  return jax.lax.cond(jnp.bool(True), one, two, x)


def _wide_in_one_branch(x):
  two = lambda x: jnp.sin(x).astype(_BF16)  # noqa: E731
  return jax.lax.cond(jnp.bool(True), _rounds, two, x)


def _in_calls(x):
  inner = jax.jit(lambda x: x.reshape(-1))
  return jax.checkpoint(_rounds)(inner(x))


def _with_derivatives(x):
  f = jax.custom_vjp(_rounds)
  f.defvjp(lambda x: (_rounds(x), None), lambda _, g: (g.astype(_F32),))
  g = jax.custom_jvp(_rounds)
  g.defjvp(lambda x, t: (_rounds(x[0]), t[0].astype(_BF16)))
  return f(x), g(x)


@pytest.mark.parametrize(
  ("program", "expected"),
  [
    (_rounds, _BF16),
    (_twice, _BF16),
    (_also_wide, None),
    (_two_dtypes, None),
    (_sliced, _BF16),
    (_index, None),
    (_in_loops, _BF16),
    (_carried, None),
    (_carried_by_while, None),
    (_becomes_carried, None),
    (_in_branches, _BF16),
    (_wide_in_one_branch, None),
    (_in_calls, _BF16),
    (_with_derivatives, _BF16),
    (lambda x: (_rounds(x), x), None),
    (lambda x: (_rounds(x), x.T), None),
    (lambda _: 0, None),
  ],
)
def test_only_what_is_rounded_wherever_it_is_read(program, expected):
  jaxpr = jax.make_jaxpr(program)(jnp.ones((2, 3)))
  assert decoding_state.rounded_dtypes(jaxpr, 1) == [expected]


def test_narrow_and_integer_inputs_stay():
  jaxpr = jax.make_jaxpr(lambda *xs: [x.astype(_F32) for x in xs])(
    jnp.ones((2,), _BF16), jnp.ones((2,), jnp.int32)
  )
  assert decoding_state.rounded_dtypes(jaxpr, 2) == [None, None]


def _session(num_devices=1, **knobs):
  job, _ = testing.make(num_layers=3, max_new_tokens=4, **knobs)
  devices = jax.devices()[:num_devices]
  return session_lib.open_session(job, devices=devices)


def _copy(state):
  return jax.tree.map(jnp.copy, state)


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


def test_small_models_stay_stacked():
  session = _session()
  state = session.initial_state()
  session, same = decoding_state.prepare(session, state)
  assert "layers" in same.variables["params"]["stack"]


@pytest.fixture(name="separate_all")
def _separate_all(monkeypatch):
  monkeypatch.setattr(decoding_state, "MIN_BYTES_TO_SEPARATE", 0)


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
