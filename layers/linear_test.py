"""Tests for linear layers."""

import math

from flax import linen as nn
import jax
from jax import ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import linear, remat, testing
from paxon.sharding import layout, mesh

EMBED, OUT = 5, 3


def _wide(tree):
  return jax.tree.map(lambda p: np.asarray(p, np.float64), tree["params"])


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)])
def test_linear_matches_numpy_in_any_rank(shape):
  layer = linear.Linear(OUT, activation=nn.relu)
  x = testing.normal(*shape, EMBED)
  values = testing.random_values(layer, x)
  params = _wide(values)
  expected = np.zeros((*shape, OUT))
  for index in np.ndindex(shape):
    row = np.asarray(x, np.float64)[index] @ params["kernel"] + params["bias"]
    expected[index] = np.maximum(row, 0)
  np.testing.assert_allclose(
    testing.apply(layer, values, x), expected, rtol=1e-5, atol=1e-6
  )


def test_linear_gradients_match_finite_differences():
  layer = linear.Linear(OUT)
  x = testing.normal(2, 3, EMBED)

  def loss(at):
    return jnp.sum(jnp.sin(layer.apply(*at)))

  testing.assert_gradients_match(loss, (testing.random_values(layer, x), x))


def test_linear_axes_dtypes_and_bias():
  x = testing.normal(1, 2, EMBED, dtype=jnp.bfloat16)
  layer = linear.Linear(OUT, kernel_axes=("mlp", "embed"), dtype=jnp.bfloat16)
  assert testing.axes(layer, x) == {
    "params/kernel": ("mlp", "embed"),
    "params/bias": ("embed",),
  }
  values = testing.random_values(layer, x)
  assert values["params"]["kernel"].dtype == jnp.float32
  assert testing.apply(layer, values, x).dtype == jnp.bfloat16
  bare = linear.Linear(OUT, use_bias=False, dtype=jnp.bfloat16)
  assert set(testing.axes(bare, x)) == {"params/kernel"}


def test_a_result_can_be_saved_by_name(capsys):
  layer = linear.Linear(OUT, remat_name="ffn1", activation=jnp.sin)
  x = testing.normal(1, 2, EMBED)
  values = testing.random_values(layer, x)

  def loss(values, x):
    return jnp.sum(jnp.sin(layer.apply(values, x)))

  policy = remat.save_only("ffn1")
  ad_checkpoint.print_saved_residuals(
    jax.checkpoint(loss, policy=policy), values, x
  )
  assert "named 'ffn1'" in capsys.readouterr().out


def test_a_perceptron_is_a_sequence_of_linear_layers():
  """Three layers, the last without activation, by linen's own Sequential."""
  model = nn.Sequential(
    [
      linear.Linear(8, activation=nn.relu),
      linear.Linear(8, activation=nn.relu, kernel_axes=("mlp", None)),
      linear.Linear(2, kernel_axes=("mlp", None)),
    ]
  )
  x = testing.normal(4, EMBED)
  values = testing.random_values(model, x)
  params = _wide(values)
  y = np.asarray(x, np.float64)
  for i in range(3):
    y = y @ params[f"layers_{i}"]["kernel"] + params[f"layers_{i}"]["bias"]
    y = np.maximum(y, 0) if i < 2 else y
  np.testing.assert_allclose(
    testing.apply(model, values, x), y, rtol=1e-5, atol=1e-5
  )


CASES = {
  "to heads": (
    linear.Einsum(
      "BTD,DNH->BTNH",
      {"N": 2, "H": 3},
      ("embed", "heads", "head_dim"),
      use_bias=True,
    ),
    (2, 3, 4),
    {"kernel": (4, 2, 3), "bias": (2, 3)},
    4,
  ),
  "from heads": (
    linear.Einsum(
      "BTNH,NHD->BTD",
      {"D": 4},
      ("heads", "head_dim", "embed"),
      use_bias=True,
    ),
    (2, 3, 2, 5),
    {"kernel": (2, 5, 4), "bias": (4,)},
    10,
  ),
  "experts": (
    linear.Einsum(
      "BTED,EDF->EBTF", {"F": 5}, ("experts", "embed", "mlp"), use_bias=True
    ),
    (2, 2, 3, 4),
    {"kernel": (3, 4, 5), "bias": (3, 5)},
    4,
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_einsum_matches_numpy(case):
  layer, shape, shapes, _ = CASES[case]
  x = testing.normal(*shape)
  values = testing.random_values(layer, x)
  assert {k: v.shape for k, v in values["params"].items()} == shapes
  params = _wide(values)
  wide = np.asarray(x, np.float64)
  expected = {
    "to heads": lambda: (
      np.tensordot(wide, params["kernel"], 1) + params["bias"]
    ),
    "from heads": lambda: (
      np.tensordot(wide, params["kernel"], 2) + params["bias"]
    ),
    "experts": lambda: np.stack(
      [
        wide[:, :, e] @ params["kernel"][e] + params["bias"][e]
        for e in range(3)
      ]
    ),
  }[case]()
  np.testing.assert_allclose(
    testing.apply(layer, values, x), expected, rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize("case", CASES)
def test_einsum_starts_with_the_fan_in_of_its_equation(case):
  layer, shape, _, fan_in = CASES[case]
  new = dict.fromkeys(layer.sizes, 60)
  kernel = testing.initial_values(
    layer.clone(sizes=new), testing.normal(*shape)
  )["params"]["kernel"]
  np.testing.assert_allclose(np.std(kernel), fan_in**-0.5, rtol=0.05)


def test_einsum_axes():
  layer, shape, _, _ = CASES["experts"]
  assert testing.axes(layer, testing.normal(*shape)) == {
    "params/kernel": ("experts", "embed", "mlp"),
    "params/bias": ("experts", "mlp"),
  }


@pytest.mark.parametrize(
  ("equation", "sizes", "message"),
  [
    ("BD,DF", {"F": 2}, r"must be 'input,kernel->output' .* got 'BD,DF'"),
    ("BDD,DF->BF", {"F": 2}, r"each once in a term, got 'BDD,DF->BF'"),
    ("BD,DF->BF", {}, r"sizes must have the letters .* \['F'\], got \[\]"),
    ("BD,DF->BF", {"F": 0}, r"sizes\['F'\] must be positive, got 0"),
  ],
)
def test_rejects_wrong_equations(equation, sizes, message):
  with pytest.raises(ValueError, match=message):
    linear.Einsum(equation, sizes, (None, None))


def test_rejects_wrong_ranks_and_sizes():
  layer = linear.Einsum("BD,DF->BF", {"F": 2}, (None, None))
  with pytest.raises(ValueError, match=r"needs an input of rank 2, got .*3, 4"):
    layer.init(jax.random.key(0), testing.normal(2, 3, 4))
  with pytest.raises(ValueError, match=r"Linear.output_dim must be positive"):
    linear.Linear(0)


@pytest.mark.parametrize(
  ("layer", "names"),
  [
    (
      linear.Linear(16, output_axes=("batch", "length", "activation_mlp")),
      (("fsdp",), None, ("tensor",)),
    ),
    (
      linear.Einsum(
        "BTD,DNH->BTNH",
        {"N": 4, "H": 2},
        ("embed", "heads", "head_dim"),
        output_axes=("batch", "length", "activation_heads", None),
      ),
      (("fsdp",), None, ("tensor",), None),
    ),
  ],
)
def test_the_result_is_split_as_its_axes_say(layer, names):
  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("fsdp=4,tensor=2")))
  x = testing.normal(8, 3, 8)
  values = testing.random_values(layer, x)
  y = where.jit(layer.apply)(values, x)
  size = dict(where.mesh.shape)
  shards = [math.prod(size[n] for n in axes) if axes else 1 for axes in names]
  expected = tuple(n // s for n, s in zip(y.shape, shards, strict=True))
  assert {s.data.shape for s in y.addressable_shards} == {expected}
  np.testing.assert_allclose(
    y, testing.apply(layer, values, x), rtol=1e-5, atol=1e-6
  )


def test_axes_of_another_rank_are_an_error():
  layer = linear.Linear(OUT, output_axes=("batch", "activation_mlp"))
  with pytest.raises(ValueError, match=r"\(2, 4, 3\) needs 3 logical axes"):
    layer.init(jax.random.key(0), testing.normal(2, 4, EMBED))
