"""Tests for distinguishing errors about the configuration from bugs."""

import dataclasses

import fiddle as fdl
from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs.sources import example_source
from paxon.runner.configuration import resolving


class _Layer(nn.Module):
  """Fails as its field says."""

  what: str

  @nn.compact
  def __call__(self, x):
    if self.what == "raise":
      raise ValueError("_Layer.what must be kind,\ngot 'raise'.")
    if self.what == "one line": raise ValueError("No.")  # fmt: skip  # noqa: E701
    match self.what:
      case "case": raise ValueError("No.")  # fmt: skip  # noqa: E701
    if self.what == "operand":
      text = "No." + 1  # pyrefly: ignore[unsupported-operation]
      raise ValueError(text)
    if self.what == "shape":
      return jnp.einsum("ab,bc->ac", x, jnp.zeros((7, 7)))
    if self.what == "unpack":
      a, b = (1, 2, 3)  # pyrefly: ignore[bad-unpacking]
      return a + b
    if self.what == "huge":
      return x + jnp.full((1, 1), 2**70)
    return x.nothing


@dataclasses.dataclass(frozen=True)
class _Model:
  layers: tuple[_Layer, ...]

  def run(self):
    for layer in self.layers:
      jax.eval_shape(lambda x, f=layer: f.init(jax.random.key(0), x), _X)


_X = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def _explain(*whats: str) -> str | None:
  config = fdl.Config(
    _Model, layers=tuple(fdl.Config(_Layer, what=what) for what in whats)
  )
  with pytest.raises(Exception) as caught:  # noqa: PT011
    fdl.build(config).run()
  return resolving.explain_error(caught.value, config)


def test_raised_error_has_the_path_of_its_module():
  assert _explain("raise") == "_Layer.what must be kind, (at layers[0])."


@pytest.mark.parametrize("what", ["one line", "case"])
def test_raise_need_not_start_its_line(what):
  assert _explain(what) == "No (at layers[0])."


def test_all_paths_of_the_class_are_listed():
  text = _explain("raise", "raise", "raise", "raise", "raise")
  assert text is not None
  assert text.endswith("(at layers[0] or layers[1] or layers[2] or 2 more).")


@pytest.mark.parametrize("what", ["shape", "unpack", "attribute", "operand"])
def test_other_errors_are_bugs(what):
  assert _explain(what) is None


def test_a_number_that_is_too_large_is_explained():
  text = _explain("huge")
  assert text is not None
  assert text.startswith("A number is too large (")
  assert text.endswith("(at layers[0]).")


def test_error_outside_of_all_modules_is_a_bug():
  config = fdl.Config(_Model, layers=())
  for error in (ValueError("a"), OSError("b"), OverflowError("c")):
    with pytest.raises(type(error)) as caught:
      raise error
    assert resolving.explain_error(caught.value, config) is None


@dataclasses.dataclass(frozen=True)
class _Source:
  folder: str

  def read(self):
    with open(self.folder) as file:
      return file.read()


def test_a_missing_file_of_a_part_is_explained(tmp_path):
  config = fdl.Config(_Source, folder=str(tmp_path / "none"))
  root = fdl.Config(dict, source=config)
  with pytest.raises(FileNotFoundError) as caught:
    fdl.build(config).read()
  text = resolving.explain_error(caught.value, root)
  assert text is not None
  assert "No such file or directory" in text
  assert text.endswith("(at source).")


def test_input_of_a_function_has_a_path():
  config = fdl.Config(
    packed_input.pack_documents,
    source=fdl.Config(example_source.InMemoryDocuments, documents=()),
    tokenizer=fdl.Config(byte_tokenizer.ByteTokenizer),
    global_batch_size=2,
    length=8,
    shuffle_seed=0,
  )
  root = fdl.Config(dict, train_input=config)
  with pytest.raises(ValueError, match="holds no examples") as caught:
    fdl.build(config).get_next()
  text = resolving.explain_error(caught.value, root)
  assert text is not None
  assert text.endswith("(at train_input).")
