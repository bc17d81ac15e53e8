"""Tests for variable metadata, through linen and its lifted transforms."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

from paxon.sharding import logical, variables


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x):
    kernel = self.param(
      "kernel",
      logical.partitioned(nn.initializers.normal(1.0), ("embed", "mlp")),
      (x.shape[-1], 4),
      jnp.float32,
    )
    bias = self.param(
      "bias", logical.partitioned(nn.initializers.zeros, ("mlp",)), (4,)
    )
    frozen = self.param(
      "frozen",
      logical.partitioned(nn.initializers.ones, (None, None), trainable=False),
      (1, 4),
    )
    self.variable(
      "statistics",
      "mean",
      variables.make_boxed_init(
        nn.initializers.ones,
        ("mlp",),
        shape=(4,),
        dtype=jnp.float32,
        combine=variables.CombineRule.MAX,
      ),
    )
    self.variable("foreign", "count", lambda: jnp.zeros((), jnp.int32))
    return x @ kernel + bias[None] + frozen


class Scanned(nn.Module):
  @nn.compact
  def __call__(self, x):
    scan = nn.scan(
      lambda layer, x: (layer(x), None),
      variable_axes={True: 0},
      split_rngs={"params": True},
      length=3,
      metadata_params={nn.PARTITION_NAME: "layers", variables.PERIOD: 2},
    )
    return scan(Layer(name="layer"), x)[0]


def _specs(module):
  abstract = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((2, 4)))
  return variables.get_specs(abstract)


def test_metadata_of_a_plain_layer():
  specs = _specs(Layer())
  kernel = specs["params"]["kernel"]
  assert kernel.name == "params/kernel"
  assert kernel.shape == kernel.layer_shape == (4, 4)
  assert kernel.axes == ("embed", "mlp")
  assert kernel.initializer is not None
  assert kernel.regularized
  assert kernel.trainable
  assert kernel.update is variables.UpdateRule.OPTIMIZER
  assert not specs["params"]["bias"].regularized
  assert not specs["params"]["frozen"].trainable
  mean = specs["statistics"]["mean"]
  assert mean.update is variables.UpdateRule.REPLACE
  assert mean.combine is variables.CombineRule.MAX
  assert not mean.trainable


def test_scan_adds_the_layers_axis_to_every_collection():
  specs = _specs(Scanned())
  kernel = specs["params"]["layer"]["kernel"]
  assert kernel.shape == (3, 4, 4)
  assert kernel.axes == ("layers", "embed", "mlp")
  assert kernel.stacked == (("layers", 2),)
  assert kernel.layer_shape == (4, 4)
  assert specs["statistics"]["layer"]["mean"].axes == ("layers", "mlp")
  # Rank is that of one layer: a stacked bias is still no matrix.
  assert not specs["params"]["layer"]["bias"].regularized


def test_variables_of_other_libraries_get_defaults():
  specs = _specs(nn.Dense(3))
  kernel = specs["params"]["kernel"]
  assert kernel.axes == (None, None)
  assert kernel.initializer is None
  assert kernel.trainable
  count = _specs(Layer())["foreign"]["count"]
  assert count.update is variables.UpdateRule.REPLACE
  assert not count.trainable


def test_abstract_and_unbox_agree():
  x = jnp.ones((2, 4))
  boxed = Scanned().init(jax.random.key(0), x)
  values = variables.unbox(boxed)
  shapes = jax.tree.map(lambda v: (v.shape, v.dtype), values)
  abstract = variables.abstract(_specs(Scanned()))
  assert shapes == jax.tree.map(lambda v: (v.shape, v.dtype), abstract)
  y = Scanned().apply(values, x, mutable=["statistics", "foreign"])[0]
  assert y.shape == (2, 4)


def test_wrong_number_of_axes():
  class Wrong(nn.Module):
    @nn.compact
    def __call__(self, x):
      init = logical.partitioned(nn.initializers.ones, ("embed",))
      return x @ self.param("kernel", init, (4, 4))

  with pytest.raises(ValueError, match=r"shape \(4, 4\) needs 2 logical axes"):
    _specs(Wrong())


@pytest.mark.parametrize(
  ("init", "message"),
  [
    (len, r"<built-in function len> is not an initializer, which is called"),
    (lambda *_: None, r"for shape \(4, 4\) it returned None\."),
    (lambda *_: jnp.ones(3), r"for shape \(4, 4\) it returned \(3,\)\."),
    (lambda *_: "a" + 1, "can only concatenate str"),
  ],
)
def test_other_functions_are_no_initializers(init, message):
  class Wrong(nn.Module):
    @nn.compact
    def __call__(self, x):
      boxed = logical.partitioned(init, ("embed", "mlp"))
      return x @ self.param("kernel", boxed, (4, 4), jnp.float32)

  with pytest.raises(TypeError, match=message):
    _specs(Wrong())


def test_axis_must_be_added_in_front():
  box = variables.Variable(jnp.ones((2,)), ("embed",))
  with pytest.raises(ValueError, match="must add axis 0"):
    box.add_axis(1, {nn.PARTITION_NAME: "layers"})


def test_boxes_print_in_one_short_line():
  box = variables.Variable(
    jnp.zeros((4, 8), jnp.bfloat16),
    ("embed", None),
    initializer=nn.initializers.zeros,
  )
  assert repr(box) == "bfloat16[embed=4, 8]"
  # JAX puts placeholders into boxes, such as the leaves' names in errors.
  assert repr(box.replace(value="x")) == "str[embed, None]"
