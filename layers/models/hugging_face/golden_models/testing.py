"""Assertions that compare families with their golden files."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import enum
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.decoding import generate, model_steps, samplers
from paxon.layers.models.hugging_face import (
  family,
  mapping,
)
from paxon.layers.models.hugging_face.golden_models import golden_case


class Outcome(enum.Enum):
  """Effect of a changed field of a configuration."""

  # The weights match, and the logits differ.
  OTHER_LOGITS = "other logits"
  # The weights do not match, so reading them is an error.
  OTHER_TENSORS = "other tensors"
  # The configuration is an error.
  REJECTED = "rejected"


# Between float32 programs, for logits of size one.
TOLERANCE = 1e-4


def variables(names: mapping.Names) -> dict[str, Any]:
  """Returns the variables of a golden model."""

  def read_rows(name: str, start: int, stop: int) -> np.ndarray:
    shape = names.tensors[name].shape
    # A scalar is one row.
    return np.atleast_1d(golden_case.weight(name, shape))[start:stop]

  flat = {
    name: jax.device_put(leaf.from_tensors(read_rows))
    for name, leaf in names.leaves.items()
  }
  return traverse_util.unflatten_dict(flat, sep="/")


def run(function: Callable[..., Any], *args: Any) -> Any:
  """Returns `function(*args)`, compiled without optimization to save time."""
  options: Any = {"xla_backend_optimization_level": 0}
  compiled = jax.jit(function).lower(*args).compile(compiler_options=options)
  return compiled(*args)


def token_args(ids: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns ids, positions and segment ids of sequences of one document."""
  positions = np.broadcast_to(
    np.arange(ids.shape[1], dtype=np.int32), ids.shape
  )
  ones = np.ones_like(ids)
  return jax.device_put(ids), jax.device_put(positions), jax.device_put(ones)


def model_args(arrays: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
  """Returns the arguments of a model for the inputs of golden files."""
  if "images" in arrays:
    keys = {"images": "images", "ids": "inputs"}
    batch = {keys[x]: arrays[x] for x in keys if x in arrays}
    return (jax.device_put(batch),)
  if "audio" in arrays:
    keys = ("audio", "audio_lengths")
    return (jax.device_put({key: arrays[key] for key in keys}),)
  args = token_args(arrays["ids"])
  if "features" in arrays:
    features = arrays["features"]
    places = np.zeros((len(features), features.shape[1] // 2), np.int32)
    _, positions, segments = token_args(places)
    return *args, jax.device_put(features), positions, segments
  if "encoder_ids" in arrays:
    ids, positions, _ = token_args(arrays["encoder_ids"])
    return *args, ids, positions, jax.device_put(arrays["encoder_mask"])
  if "mask" in arrays:
    args = *args[:2], *(jax.device_put(arrays[x]) for x in ("mask", "type_ids"))
    if arrays["logits"].ndim > 2:
      return args
    # A classifier takes a batch.
    keys = ("inputs", "positions", "segment_ids", "type_ids")
    return (dict(zip(keys, args, strict=True)),)
  return args


def logits(
  of: family.Family,
  config: Mapping[str, Any],
  arrays: Mapping[str, np.ndarray],
) -> np.ndarray:
  """Returns the logits of a model with golden weights.

  Args:
    of: The family.
    config: Content of `config.json`.
    arrays: Inputs of golden files. Logits of padding are the stored ones.
  """
  weights = variables(of.names(config))
  found = run(of.model(config).apply, weights, *model_args(arrays))
  if "audio" in arrays:
    found, is_real = found
    return np.where(is_real[:, :, None], found, arrays["logits"])
  if "mask" not in arrays or found.ndim == 2:
    return np.asarray(found)
  return np.where(arrays["mask"][:, :, None], found, arrays["logits"])


def causal_lm_logits(
  of: family.Family, config: Mapping[str, Any], ids: np.ndarray
) -> np.ndarray:
  """Returns the logits of a decoder with golden weights for ids [B,T]."""
  model = of.model(config)
  weights = variables(of.names(config))
  return np.asarray(run(model.apply, weights, *token_args(ids)))


def check_logits(of: family.Family, case: str) -> None:
  """Asserts that a decoder gives the stored logits.

  Args:
    of: The family.
    case: Name of the golden files.
  """
  golden = golden_case.read(case)
  logits = causal_lm_logits(of, golden.config, golden.arrays["ids"])
  np.testing.assert_allclose(
    logits, golden.arrays["logits"], rtol=0, atol=TOLERANCE
  )


def pack(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns ids, positions and segments of one row, int32 [1,T].

  It has the first 8 ids of the first of two sequences, all but the last 11 of
  the second, and three of padding.
  """
  sizes = np.asarray([8, ids.shape[1] - 11])
  row = np.concatenate([ids[0, : sizes[0]], ids[1, : sizes[1]], [5, 5, 5]])
  segments = np.repeat([1, 2, 0], [*sizes, 3])
  positions = np.concatenate([np.arange(n) for n in (*sizes, 3)])
  return (
    row[None].astype(np.int32),
    positions[None].astype(np.int32),
    segments[None].astype(np.int32),
  )


def generate_greedily(model: Any, weights: Any, ids: np.ndarray) -> np.ndarray:
  """Returns the ids [B, NEW_IDS] after the prompts in `ids`, by the cache."""
  prompts = ids[:, : golden_case.PROMPT_LENGTH]

  def generate_ids(weights: Any, prompts: jax.Array) -> jax.Array:
    return generate.generate(
      model_steps.make_prefill(model, weights),
      model_steps.make_decode_step(model, weights),
      prompts,
      jnp.full((len(prompts),), prompts.shape[1], jnp.int32),
      sampler=samplers.Greedy(),
      key=jax.random.key(0),
      max_new_tokens=golden_case.NEW_IDS,
    ).ids

  return np.asarray(run(generate_ids, weights, jax.device_put(prompts)))


def check_packed(of: family.Family, case: str) -> None:
  """Asserts that packed documents give the stored logits of each.

  Args:
    of: The family, of decoders.
    case: Name of the golden files.
  """
  golden = golden_case.read(case)
  ids, logits = golden.arrays["ids"], golden.arrays["logits"]
  args = (jax.device_put(x) for x in pack(ids))
  sizes = np.asarray([8, ids.shape[1] - 11])
  model, weights = of.model(golden.config), variables(of.names(golden.config))
  found = np.asarray(run(model.apply, weights, *args))[0]
  # A decoder's logits do not depend on what follows.
  expected = [logits[i, : sizes[i]] for i in range(2)]
  np.testing.assert_allclose(
    found[: sizes.sum()], np.concatenate(expected), rtol=0, atol=TOLERANCE
  )


def check_greedy(of: family.Family, case: str) -> None:
  """Asserts that a decoder gives the stored greedy continuations.

  Args:
    of: The family.
    case: Name of the golden files.
  """
  golden = golden_case.read(case)
  model = of.model(golden.config)
  weights = variables(of.names(golden.config))
  result = generate_greedily(model, weights, golden.arrays["ids"])
  np.testing.assert_array_equal(result, golden.arrays["greedy"])


def check_names(of: family.Family, case: str, *args: Any) -> None:
  """Asserts that names and shapes are those of the model's variables.

  Args:
    of: The family.
    case: Name of the golden files.
    *args: Arguments of the model; the family's example by default.
  """
  config = golden_case.read(case).config
  args = args or of.example(config)
  abstract = jax.eval_shape(of.model(config).init, jax.random.key(0), *args)
  flat: dict[str, Any] = traverse_util.flatten_dict(nn.unbox(abstract), sep="/")
  expected = {name: leaf.shape for name, leaf in flat.items()}
  actual = {name: leaf.shape for name, leaf in of.names(config).leaves.items()}
  assert actual == expected


@dataclasses.dataclass(frozen=True)
class _Call:
  """A call of `make`."""

  cls: Callable[..., Any]
  fields: Mapping[str, Any]


def check_make(of: family.Family, case: str) -> None:
  """Asserts that `make` builds every module, so that all are configurable.

  Args:
    of: The family.
    case: Name of the golden files.
  """
  config = golden_case.read(case).config

  def make(cls: Callable[..., Any], /, **fields: Any) -> _Call:
    assert not any(isinstance(x, nn.Module) for x in jax.tree.leaves(fields))
    return _Call(cls, fields)

  def build(value: Any) -> Any:
    if isinstance(value, list | tuple):
      return type(value)(build(x) for x in value)
    if not isinstance(value, _Call):
      return value
    return value.cls(**{k: build(x) for k, x in value.fields.items()})

  assert build(of.model(config, make)) == of.model(config)


def check_round_trip(of: family.Family, case: str) -> None:
  """Asserts that a round trip keeps every bit of the tensors.

  Args:
    of: The family.
    case: Name of the golden files.
  """
  names = of.names(golden_case.read(case).config)
  tensors = {
    # A scalar is one row.
    name: np.atleast_1d(golden_case.weight(name, tensor.shape))
    for name, tensor in names.tensors.items()
  }
  back = {name: np.full_like(value, np.nan) for name, value in tensors.items()}
  for leaf in names.leaves.values():
    array = leaf.from_tensors(
      lambda name, start, stop: tensors[name][start:stop]
    )
    for name, start, rows, columns in leaf.to_tensors(array):
      back[name][start : start + len(rows)][..., columns] = rows
  for name, value in tensors.items():
    np.testing.assert_array_equal(back[name], value, err_msg=name)


def check_sensitive(
  of: family.Family,
  case: str,
  changes: Mapping[str, Any],
  outcome: Outcome,
  logits: Callable[
    [family.Family, Mapping[str, Any], np.ndarray], np.ndarray
  ] = causal_lm_logits,
) -> None:
  """Asserts the effect of a changed configuration.

  Args:
    of: The family.
    case: Name of the golden files.
    changes: Changed fields of `config.json`.
    outcome: The expected effect.
    logits: Computes logits of a family, configuration and ids.
  """
  golden = golden_case.read(case)
  config = {**golden.config, **changes}
  assert config != golden.config
  if outcome is Outcome.REJECTED:
    with pytest.raises(family.UnsupportedConfigError):
      of.names(config)
    return
  if outcome is Outcome.OTHER_TENSORS:
    assert _shapes(of.names(config)) != _shapes(of.names(golden.config))
    return
  # The weights are the same, so differences come from the configuration.
  assert _shapes(of.names(config)) == _shapes(of.names(golden.config))
  found = logits(of, config, golden.arrays.get("ids", np.zeros(0)))
  difference = np.abs(found - golden.arrays["logits"]).max()
  # NaN at unsupported positions.
  assert not difference <= 10 * TOLERANCE


def check_all_covered(case: str, fields: Iterable[str]) -> None:
  """Asserts that each field of a golden configuration is listed.

  Args:
    case: Name of the golden files.
    fields: Fields whose changes are tested, and those without effect here that
      are not in `INERT`.
  """
  known = {"architectures", "model_type", *family.INERT, *fields}
  known |= set(family.UNSET)
  rest = set(golden_case.read(case).config) - known
  assert not rest, rest


def _shapes(names: mapping.Names) -> dict[str, tuple[int, ...]]:
  return {name: tensor.shape for name, tensor in names.tensors.items()}
