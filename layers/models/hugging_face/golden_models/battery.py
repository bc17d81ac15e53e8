"""Compares a family with transformers, from the `config.json` of a tiny model.

  P=paxon.layers.models.hugging_face.golden_models
  python -m $P.battery CONFIG.json

It needs torch and transformers. transformers makes the model with random
weights and writes its files; then these are compared: files (names, shapes,
values there and back), logits, gradients of all tensors, packed documents,
greedy continuations through the cache, and logits after each field of the
configuration is changed once. Exits with 1 if anything differs.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import pathlib
import sys
import tempfile
from typing import Any

from etils import epath
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.models.hugging_face import families, family
from paxon.layers.models.hugging_face.files import weight_files
from paxon.layers.models.hugging_face.golden_models import golden_case, testing

# Fields whose change makes another kind of output, or no other model.
_FIXED = frozenset(
  {*family.INERT, "vocab_size", "max_position_embeddings", "model_type"}
)
_ACTIVATIONS = {"silu": "gelu", "relu2": "silu", "gelu_new": "relu"}

# `(what was compared, largest difference or reason, whether it is a failure)`.
Finding = tuple[str, str, bool]


def change(value: Any) -> Any:
  """Returns another value of a field, or `None`."""
  if isinstance(value, bool):
    return not value
  if isinstance(value, float):
    return value * 1.5 + 0.01
  if isinstance(value, int):
    return value + 1
  return _ACTIVATIONS.get(str(value))


def _make(config: Mapping[str, Any]) -> Any:
  """Returns transformers' model of a configuration, with random weights."""
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  torch.manual_seed(0)
  (architecture,) = config["architectures"]
  cls = getattr(transformers, architecture)
  fields = {k: v for k, v in config.items() if k != "architectures"}
  model = cls(cls.config_class.from_dict(fields)).float().eval()
  with torch.no_grad():
    for parameter in model.parameters():
      # Norms of one and biases of zero would hide faults.
      parameter.add_(0.2 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
      if name.endswith("e_score_correction_bias"):
        buffer.add_(0.2 * torch.randn_like(buffer))
  return model


class _Pair:
  """A model in transformers and ours, with the same weights."""

  def __init__(self, config: Mapping[str, Any], folder: pathlib.Path) -> None:
    self.theirs = _make(config)
    self.theirs.save_pretrained(folder)
    self.config = json.loads((folder / "config.json").read_text())
    of = families.find(self.config)
    self.names = of.names(self.config)
    self.ours = of.model(self.config)
    self.files = weight_files.find(epath.Path(folder), names=self.names)
    self.files.check()
    flat = {
      name: jax.device_put(leaf.from_tensors(self.files.read_rows))
      for name, leaf in self.names.leaves.items()
    }
    self.weights = traverse_util.unflatten_dict(flat, sep="/")

  def their_logits(self, ids: np.ndarray) -> np.ndarray:
    """Returns the logits of transformers, float32 [B,T,V]."""
    import torch  # pyrefly: ignore[missing-import]

    with torch.no_grad():
      return self.theirs(torch.from_numpy(ids).long()).logits.numpy()

  def our_logits(self, *args: jax.Array) -> np.ndarray:
    """Returns our logits, float32 [B,T,V]."""
    return np.asarray(testing.run(self.ours.apply, self.weights, *args))


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
  """Returns the largest difference, for values of size one."""
  size = max(1.0, float(np.abs(expected).max()) / 5)
  return float(np.abs(found - expected).max()) / size


def _compare_files(pair: _Pair) -> Iterator[Finding]:
  unused = [x for x in pair.files.find_unused() if x not in pair.names.tied]
  yield "files: unused tensors", ", ".join(unused) or "none", bool(unused)
  wrong = []
  for name, leaf in pair.names.leaves.items():
    value = leaf.from_tensors(pair.files.read_rows)
    for tensor, start, rows, columns in leaf.to_tensors(value):
      stored = pair.files.read_rows(tensor, start, start + len(rows))
      if not np.array_equal(stored[..., columns].reshape(rows.shape), rows):
        wrong.append(name)
  yield "files: values there and back", ", ".join(wrong) or "equal", bool(wrong)


def _compare_gradients(
  pair: _Pair, ids: np.ndarray
) -> Iterator[tuple[str, float]]:
  """Yields the difference of the gradients, relative to their size."""
  import torch  # pyrefly: ignore[missing-import]

  weights = np.random.RandomState(1).standard_normal(
    (*ids.shape, pair.theirs.config.vocab_size)
  )
  logits = pair.theirs(torch.from_numpy(ids).long()).logits
  (logits * torch.from_numpy(weights).float()).sum().backward()
  factors = jnp.asarray(weights, jnp.float32)

  def loss(values: Any) -> jax.Array:
    found = pair.ours.apply(values, *testing.token_args(ids))
    return jnp.sum(found * factors)

  grads = traverse_util.flatten_dict(
    testing.run(jax.grad(loss), pair.weights), sep="/"
  )
  # Those of parameters that files have in another form are left out.
  theirs = {
    name: parameter.grad.numpy()
    for name, parameter in pair.theirs.named_parameters()
    if parameter.grad is not None and name in pair.names.tensors
  }
  # Some are zero but for rounding, such as that of a bias of keys.
  least = 1e-2 * max(float(np.abs(each).max()) for each in theirs.values())
  for name, leaf in pair.names.leaves.items():
    for tensor, start, rows, columns in leaf.to_tensors(
      np.asarray(grads[name])
    ):
      if tensor in theirs:
        expected = np.atleast_1d(theirs[tensor])
        expected = expected[start : start + len(rows)][..., columns]
        size = max(float(np.abs(expected).max()), least)
        yield tensor, float(np.abs(rows - expected).max()) / size


def _compare_mutations(
  config: Mapping[str, Any], ids: np.ndarray
) -> Iterator[Finding]:
  rejected, skipped, compared = [], [], 0
  of = families.find(config)
  for name, value in sorted(config.items()):
    # Modules of further tokens, whose weights transformers does not write.
    is_fixed = name in _FIXED or of.aliases.get(name, name) == of.further_layers
    changed = None if is_fixed else change(value)
    if changed is None:
      continue
    with tempfile.TemporaryDirectory() as folder:
      try:
        model = _make({**config, name: changed})
        model(model.dummy_inputs["input_ids"])
      except Exception:  # Of any kind: it does not check all values.
        skipped.append(name)
        continue
      try:
        pair = _Pair({**config, name: changed}, pathlib.Path(folder))
      except family.UnsupportedConfigError:
        rejected.append(name)
        continue
      found = pair.our_logits(*testing.token_args(ids))
      difference = _difference(found, pair.their_logits(ids))
    compared += 1
    if not difference < testing.TOLERANCE:
      yield f"{name}={changed!r}", f"{difference:.1e}", True
  for what, fields in (("rejected", rejected), ("no model there", skipped)):
    yield f"changed fields: {what}", ", ".join(fields) or "none", False
  yield "changed fields: compared", str(compared), not compared


def check(config: Mapping[str, Any]) -> Iterator[Finding]:
  """Yields each comparison, with its largest difference.

  Args:
    config: Content of `config.json`, of a model with random weights that runs
      in seconds.

  Raises:
    UnsupportedConfigError: No family reads it.
    WeightsError: Files of transformers do not have the weights.
  """
  size = int(config["vocab_size"])
  ids = golden_case.ids("battery", vocab_size=size)
  with tempfile.TemporaryDirectory() as folder:
    pair = _Pair(config, pathlib.Path(folder))
    yield from _compare_files(pair)
  expected = pair.their_logits(ids)
  numbers = {
    "logits": _difference(pair.our_logits(*testing.token_args(ids)), expected)
  }
  gradients = dict(_compare_gradients(pair, ids))
  worst = max(gradients, key=lambda name: gradients[name])
  numbers[f"gradients of {len(gradients)} tensors, worst {worst}"] = gradients[
    worst
  ]
  row, positions, segments = testing.pack(ids)
  found = pair.our_logits(
    *(jax.device_put(x) for x in (row, positions, segments))
  )
  inside = np.concatenate([expected[0, :8], expected[1, : ids.shape[1] - 11]])
  numbers["packed documents"] = _difference(found[0, : len(inside)], inside)
  for what, number in numbers.items():
    yield what, f"{number:.1e}", not number < testing.TOLERANCE
  greedy = testing.generate_greedily(pair.ours, pair.weights, ids)
  whole = np.concatenate([ids[:, : golden_case.PROMPT_LENGTH], greedy], axis=1)
  best = pair.their_logits(whole)[:, golden_case.PROMPT_LENGTH - 1 : -1]
  lost = best.max(-1) - np.take_along_axis(best, greedy[..., None], -1)[..., 0]
  number = float(lost.max())
  # The logit of each id that the cache chose, below the largest there.
  yield "greedy through the cache", f"{number:.1e}", not number < 1e-3
  yield from _compare_mutations(config, ids)


def main(argv: Sequence[str]) -> int:
  """Prints the findings; returns the exit status."""
  (path,) = argv
  failed = False
  for what, text, is_failure in check(
    json.loads(pathlib.Path(path).read_text())
  ):
    print(f"{'FAILED' if is_failure else 'ok':6}  {what}: {text}", flush=True)
    failed |= is_failure
  return int(failed)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
