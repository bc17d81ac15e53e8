"""What holds for every family of models, by one battery.

Sharded = unsharded, for values and gradients, on eight devices; and decoding =
forward. Each family is compiled once for one device, once for eight and once
for decoding, with little effort of the compiler.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.models import testing as models_testing
from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.sharding import layout, mesh

LENGTH, SOURCE = 8, 16
_OPTIONS = {"xla_backend_optimization_level": 0}


def _golden(case: str) -> nn.Module:
  config = golden_case.read(case).config
  return families.find(config).model(config)


# One of each structure. `decoder_lm_*_test` has those of Llama and GPT-2; the
# others differ by a part or a number.
_DECODERS = ("gemma2", "gpt_neox", "mamba2")
_FAMILIES: Mapping[str, Callable[[], nn.Module]] = {
  **{
    name: functools.partial(_golden, name)
    for name in (*_DECODERS, "t5", "bert")
  },
  "prefix_lm": models_testing.tiny_prefix_lm,
  "classifier": functools.partial(models_testing.tiny_classifier, 8),
}
_MESH = "fsdp=2,sequence=2,tensor=2"
# All parameters are gathered over `fsdp`, all keys over `sequence`, and sums
# added up over `tensor`.
_COLLECTIVES = ("all-gather", "all-reduce")
# Of eight devices; one axis that is not used would make it a quarter.
_LARGEST_SHARE = 0.2


def _batch(family: str) -> dict[str, jax.Array]:
  rows = [[6, 2], [8], [3, 4], [5]] * 2
  if family == "t5":
    pairs = [[(2 * size, size) for size in row] for row in rows]
    return models_testing.paired_batch(pairs, source=SOURCE, length=LENGTH)
  batch = models_testing.packed_batch(rows, LENGTH)
  if family == "prefix_lm":
    batch["prefix"] = batch["positions"] < 2
  if family == "classifier":
    batch["labels"] = jnp.arange(8, dtype=jnp.int32)
    batch["example_weights"] = jnp.ones((8,)).at[3].set(0.0)
  return batch


def _loss_and_gradient(model: nn.Module) -> Callable[..., Any]:
  def loss(values: Any, batch: Any) -> jax.Array:
    total, weight = model.apply(values, batch, method="loss")[0]
    return total / weight

  return jax.value_and_grad(loss)


def _products(compiled: jax.stages.Compiled) -> float:
  return compiled.cost_analysis()["flops"]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("family", _FAMILIES)
def test_sharded_equals_unsharded(family):
  model, batch = _FAMILIES[family](), _batch(family)
  values = testing.random_values(model, batch, method="loss")
  whole = jax.jit(_loss_and_gradient(model)).lower(values, batch)
  whole = whole.compile(compiler_options=_OPTIONS)
  expected = whole(values, batch)

  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(_MESH)))
  shardings = where.shardings(testing.specs(model, batch, method="loss"))
  of_batch = {name: where.batch_sharding(x.ndim) for name, x in batch.items()}
  lowered = where.jit(
    _loss_and_gradient(model),
    in_shardings=(shardings, of_batch),
    out_shardings=(where.replicated, shardings),
  ).lower(values, batch)
  compiled = lowered.compile(compiler_options=_OPTIONS)
  actual = compiled(*testing.place((values, batch), (shardings, of_batch)))

  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
  jax.tree.map(_check_gradient, actual[1], expected[1])
  # A mesh that is not used would give the same numbers.
  for collective in _COLLECTIVES:
    assert f" {collective}" in compiled.as_text()
  assert _products(compiled) < _LARGEST_SHARE * _products(whole)


def _check_gradient(actual: jax.Array, expected: jax.Array) -> None:
  size = np.linalg.norm(expected)
  difference = np.asarray(actual) - np.asarray(expected)
  assert np.linalg.norm(difference) < 1e-4 * size + 1e-6


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("family", _DECODERS)
def test_decoding_equals_the_forward_pass(family):
  """A prompt, several tokens at once and single ones, each as in one pass."""
  model = _golden(family)
  rng = np.random.default_rng(3)
  ids = rng.integers(1, models_testing.VOCAB, (2, LENGTH))
  tokens = (
    testing.array(ids, jnp.int32),
    testing.make_positions(2, LENGTH),
    testing.ones(2, LENGTH),
  )
  values = testing.random_values(model, *tokens)

  def run(values: Any, tokens: Any) -> Any:
    parts, state = [], {}
    for start, stop in ((0, 3), (3, 5), (5, 6), (6, 7), (7, 8)):
      fields = {} if state else {"cache_length": LENGTH}
      logits, state = model.apply(
        {**values, **state},
        *(x[:, start:stop] for x in tokens),
        **fields,
        method="decode_step" if state else "prefill",
        mutable=["cache"],
      )
      parts.append(logits)
    return model.apply(values, *tokens), jnp.concatenate(parts, axis=1)

  compiled = jax.jit(run).lower(values, tokens)
  compiled = compiled.compile(compiler_options=_OPTIONS)
  expected, actual = compiled(values, tokens)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
  # What came before matters, or the cache would not.
  assert np.max(np.abs(expected[0] - expected[1])) > 0.1


# For each model in bfloat16, the parameters that are read in float32.
_READ_WIDE: Mapping[str, set[str]] = {
  "deepseek_v3": {"scale", "router/logits/kernel", "selection_bias"},
  "gpt_oss": {
    "scale",
    "sinks/sinks",
    "router/logits/kernel",
    "router/logits/bias",
  },
  "mamba2": {"scale", "step_offset", "log_rate", "skip"},
  "qwen3_next": {"scale", "step_offset", "log_rate", "router/logits/kernel"},
}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("case", _READ_WIDE)
def test_parameters_are_read_rounded_as_they_say(case):
  """A value already rounded to `read_dtype` gives the same bits."""

  def make(cls: Any, **fields: Any) -> Any:
    if "dtype" in cls.__dataclass_fields__:
      fields.setdefault("dtype", jnp.bfloat16)
    return cls(**fields)

  config = dict(golden_case.read(case).config)
  if "layer_types" in config:
    config["layer_types"] = config["layer_types"][-1:]
    config["num_hidden_layers"] = 1
  model = families.find(config).model(config, make)
  ids = testing.array([[3, 5, 2, 7]], jnp.int32)
  tokens = ids, testing.make_positions(1, 4), testing.ones(1, 4)
  values = testing.random_values(model, *tokens)
  specs = testing.specs(model, *tokens)

  def run(values: Any) -> Any:
    fields = {"cache_length": 5, "method": "prefill", "mutable": ["cache"]}
    logits, state = model.apply(values, *tokens, **fields)
    fields = {"method": "decode_step", "mutable": ["cache"]}
    one = tuple(x[:, :1] for x in tokens)
    return logits, model.apply({**values, **state}, *one, **fields)[0]

  def round_value(spec: Any, x: jax.Array) -> jax.Array:
    return x if spec.read_dtype is None else _as(x, spec.read_dtype)

  options = {**_OPTIONS, "xla_allow_excess_precision": False}
  compiled = jax.jit(run).lower(values).compile(compiler_options=options)
  rounded = jax.tree.map(round_value, specs, values)
  jax.tree.map(
    np.testing.assert_array_equal, compiled(rounded), compiled(values)
  )
  wide = [s.name for s in jax.tree.leaves(specs) if s.read_dtype is None]
  found = {next(w for w in _READ_WIDE[case] if x.endswith(w)) for x in wide}
  assert found == _READ_WIDE[case]


def _as(x: jax.Array, dtype: Any) -> jax.Array:
  return x.astype(dtype).astype(x.dtype)
