"""Tests for LSTM and GRU, against float64 numpy and PyTorch's outputs."""

import pathlib

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing as layer_testing
from paxon.layers.norms import rms_norm
from paxon.layers.recurrent import cells, testing
from paxon.layers.stacks import block

PACKED = testing.segments("11112220333", "00111111100")
LAYERS = {
  "lstm": cells.Lstm(6),
  "praxis": cells.Lstm(6, cell_cap=0.4, forget_bias=1.0, activation=None),
  "norm": cells.Lstm(6, norm_epsilon=1e-2, output_dim=4),
  "cifg": cells.Lstm(6, couple_gates=True, output_dim=4, forget_bias=0.5),
  "gru": cells.Gru(6),
}
_ALL = pytest.mark.parametrize("name", LAYERS)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _lstm_step(layer, p, h, c, token):
  gates = np.tensordot(token, p["input"], 1) + np.tensordot(
    h, p["recurrent"], 1
  )
  if layer.norm_epsilon is not None:
    mean, variance = gates.mean(1), gates.var(1) + layer.norm_epsilon
    gates = (gates - mean[:, None]) / np.sqrt(variance)[:, None] * p["scale"]
  gates = gates + p["bias"]
  if layer.couple_gates:
    update, forget, output = gates
    admit = 1 - _sigmoid(forget + layer.forget_bias)
  else:
    update, admit, forget, output = gates
    admit = _sigmoid(admit)
  c = _sigmoid(forget + layer.forget_bias) * c + admit * np.tanh(update)
  if layer.cell_cap is not None:
    c = np.clip(c, -layer.cell_cap, layer.cell_cap)
  h = _sigmoid(output) * (c if layer.activation is None else np.tanh(c))
  return (h @ p["out"] if layer.output_dim else h), c


def _gru_step(layer, p, h, c, token):
  del layer
  ahead = np.tensordot(token, p["input"], 1) + p["bias"]
  past = np.tensordot(h, p["recurrent"], 1)
  reset, mix = _sigmoid(ahead[0] + past[0]), _sigmoid(ahead[1] + past[1])
  new = np.tanh(ahead[2] + reset * (past[2] + p["update_bias"]))
  return mix * h + (1 - mix) * new, c


def _oracle(layer, params, x, segments):
  """Runs each document alone, one token at a time."""
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  x, segments = np.asarray(x, np.float64), np.asarray(segments)
  step = _gru_step if isinstance(layer, cells.Gru) else _lstm_step
  width = getattr(layer, "output_dim", None) or layer.hidden_dim
  y = np.zeros((*x.shape[:2], width))
  for b in range(len(x)):
    before, h, c = 0, None, None
    for t in range(x.shape[1]):
      segment = int(segments[b, t])
      if not segment:
        continue
      if segment != before:
        h, c, before = np.zeros(width), np.zeros(layer.hidden_dim), segment
      h, c = step(layer, p, h, c, x[b, t])
      y[b, t] = h
  return y


def _inputs(name):
  x = layer_testing.normal(*PACKED.shape, testing.EMBED)
  return x, layer_testing.random_values(LAYERS[name], x)


@_ALL
def test_equals_the_recurrence_in_float64(name):
  x, values = _inputs(name)
  layer, dirty = LAYERS[name].clone(param_dtype=jnp.float64), np.array(x)
  dirty[np.asarray(PACKED) == 0] = np.nan
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda v: np.asarray(v, np.float64), values)
    found = jax.jit(
      lambda v, x: layer.apply(v, *layer_testing.in_context(x, None, PACKED))
    )(wide, np.asarray(dirty, np.float64))
  expected = _oracle(LAYERS[name], values["params"], x, PACKED)
  np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", testing.TORCH_CASES)
def test_equals_torch(name):
  kind, projection = testing.TORCH_CASES[name]
  num_gates = {"lstm": 4, "gru": 3}[kind]
  hidden, output = testing.HIDDEN, projection or testing.HIDDEN

  def read(suffix, *shape):
    return testing.torch_weight(f"{suffix}_l0", shape)

  def by_gate(x):
    # PyTorch has the input, forget, update and output gate.
    gates = x.reshape(num_gates, hidden, *x.shape[1:])
    return gates if kind == "gru" else gates[[2, 0, 1, 3]]

  rows = num_gates * hidden
  ahead, past = by_gate(read("bias_ih", rows)), by_gate(read("bias_hh", rows))
  params = {
    "input": by_gate(read("weight_ih", rows, testing.EMBED)),
    "recurrent": by_gate(read("weight_hh", rows, output)),
  }
  params = {n: np.moveaxis(x, -1, 0) for n, x in params.items()}
  if kind == "gru":
    layer = cells.Gru(hidden)
    params["update_bias"] = past[2].copy()
    past[2] = 0
  else:
    layer = cells.Lstm(hidden, output_dim=projection)
  params["bias"] = ahead + past
  if projection:
    params["out"] = read("weight_hr", projection, hidden).T
  path = pathlib.Path(__file__).parent / "goldens" / "torch_cells.npz"
  with np.load(path) as goldens, jax.enable_x64(True):
    found = jax.jit(layer.clone(param_dtype=jnp.float64).apply)(
      {"params": params}, testing.torch_input()
    )
    np.testing.assert_allclose(found, goldens[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["norm", "gru"])
def test_zoneout_keeps_entries_of_the_state(name):
  layer = LAYERS[name].clone(zoneout=0.3)
  x, values = _inputs(name)
  segments = testing.segments("111112222", "000000000")
  x = x[:, :9]

  def run(layer, rngs=None):
    args = layer_testing.in_context(
      x, None, segments, deterministic=rngs is None
    )
    return np.asarray(jax.jit(layer.apply)(values, *args, rngs=rngs))

  # Trained layers have the expected state, which is that of numpy.
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), values["params"])
  step = _gru_step if name == "gru" else _lstm_step
  evaluated = run(layer)
  for start, end in ((0, 5), (5, 9)):
    width = p["recurrent"].shape[0]
    h, c = np.zeros(width), np.zeros(6)
    for t in range(start, end):
      new = step(layer, p, h, c, np.asarray(x, np.float64)[0, t])
      h, c = (0.3 * a + 0.7 * b for a, b in zip((h, c), new, strict=True))
      np.testing.assert_allclose(evaluated[0, t], h, rtol=1e-4, atol=1e-5)
  keys = [{"dropout": jax.random.key(i)} for i in (1, 1, 2)]
  found = [run(layer, each) for each in keys]
  np.testing.assert_array_equal(found[0], found[1])
  assert np.any(found[0] != found[2])
  # An entry that is kept equals that of the token before.
  kept = found[0][0, 1:5] == found[0][0, :4]
  assert 0 < kept.sum() < kept.size
  plain = run(LAYERS[name])
  first = found[0][0, 0]
  np.testing.assert_array_equal(first[first != 0], plain[0, 0][first != 0])


def test_blocks_pass_training_to_zoneout():
  layer = block.MixerBlock(
    norm=rms_norm.RmsNorm(),
    mixer=cells.Bidirectional(cells.Gru(2, zoneout=0.5), cells.Gru(2)),
  )
  x = layer_testing.normal(1, 6, 4)
  values = layer_testing.random_values(layer, x)
  rngs = {"dropout": jax.random.key(0)}
  args = layer_testing.in_context(x, deterministic=False)
  trained = np.asarray(jax.jit(layer.apply)(values, *args, rngs=rngs))
  assert np.any(trained != layer_testing.apply(layer, values, x))


def test_bidirectional_reads_each_document_from_both_ends():
  x, _ = _inputs("gru")
  layer = cells.Bidirectional(cells.Gru(6), cells.Gru(6))
  values = layer_testing.random_values(layer, x)
  found = layer_testing.apply(
    layer, values, *layer_testing.in_context(x, None, PACKED)
  )
  params = values["params"]
  ahead = _oracle(cells.Gru(6), params["forward"], x, PACKED)
  back = _oracle(cells.Gru(6), params["backward"], x[:, ::-1], PACKED[:, ::-1])[
    :, ::-1
  ]
  expected = np.concatenate([ahead, back], axis=-1)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  with pytest.raises(ValueError, match="cannot decode"):
    layer.apply(values, *layer_testing.in_context(x, cache_length=4))


def test_bfloat16_keeps_the_state_in_float32():
  x, values = _inputs("lstm")
  layer = LAYERS["lstm"].clone(dtype=jnp.bfloat16)
  y, state = jax.jit(
    lambda v, x: layer.apply(
      v, *layer_testing.in_context(x, cache_length=1), mutable=["cache"]
    )
  )(values, x)
  assert y.dtype == jnp.bfloat16
  assert nn.unbox(state)["cache"]["cell"].dtype == jnp.float32


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: cells.Lstm(0), "Lstm.hidden_dim must be positive"),
    (lambda: cells.Lstm(4, cell_cap=0.0), "Lstm.cell_cap must be positive"),
    (lambda: cells.Gru(-1), "Gru.hidden_dim must be positive"),
  ],
)
def test_wrong_fields(make, message):
  with pytest.raises(ValueError, match=message):
    make()
