"""Tests for functions from text."""

import dataclasses
import re
import sys

import fiddle as fdl
import jax
import pytest

from paxon.layers import remat
from paxon.layers.attention import splash
from paxon.layers.stacks import stack
from paxon.runner.configuration import annotations, dump, text_values


@dataclasses.dataclass
class Loose:
  """A dataclass that can change."""

  def __call__(self):
    """Is here so that it could be called."""


@dataclasses.dataclass(frozen=True)
class Fixed:
  """A dataclass that cannot be called."""


_ME = __name__


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("layers.remat.save_nothing", remat.save_nothing),
    ("paxon.layers.remat.save_nothing", remat.save_nothing),
    ("jax.nn.relu", jax.nn.relu),
    ("layers.attention.splash.Splash()", splash.Splash()),
    ("layers.attention.splash.Splash", splash.Splash()),
    ("jax.numpy.tanh", jax.numpy.tanh),
    ("layers.remat.SaveOnly(('a', 'b'))", remat.SaveOnly(("a", "b"))),
    ("layers.remat.SaveOnly(names=('a',))", remat.SaveOnly(("a",))),
  ],
)
def test_text_becomes_the_function(text, expected):
  assert text_values.parse_function(text) == expected


def test_what_a_configuration_shows_can_be_given_back():
  joined = remat.save_only("a") | remat.offload("b") | remat.save_projections
  for value in (remat.save_projections, remat.SaveOnly(("a", "b")), joined):
    config = fdl.Config(stack.Stack, num_layers=1, remat_policy=value)
    (shown,) = re.findall(r"remat_policy = (.*)", dump.to_text(config))
    assert text_values.parse_function(shown) == value


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", r"^expected the import path of a function, such as layers.*, got ''$"),
    ("relu", r"import path .*, got 'relu'$"),
    ("3.5", r"import path .*, got '3.5'$"),
    ("nn.relu", r"^there is no module 'nn'; write the import path of"),
    ("a." * 999 + "b", r"import path .*, got '(a\.)+\.\.\.'$"),
    ("layers.remat.save_nothng", r"no function 'save_nothng'; did you mean 's"),
    ("layers.remat.ATTENTION_QUERY", r"expected a function, and .* is a str$"),
    ("layers.remat.SaveOnly", r"^expected a function, got the class layers.re"),
    # In tests the checker of shapes sees it first, with other words.
    ("layers.remat.SaveOnly(('a'))", r"(?s)names.*tuple\[str, ...\]"),
    ("layers.remat.SaveOnly(())", r"SaveOnly.names must not be empty"),
    ("layers.remat.SaveOnly(nam=1)", r"'nam(es)?'"),
    ("layers.remat.SaveOnly(x)", r"arguments of layers.remat.SaveOnly must be"),
    (
      "layers.remat.Either((layers.remat.Off(('a',)),))",
      r"function 'Off'; did",
    ),
    ("layers.remat.Either((os.system('x'),))", r"os.system\(...\) would run s"),
    ("os.system('touch pwned')", r"^os.system\(...\) would run something; onl"),
    ("__import__('os').system('x')", r"import path of a function, such as"),
    (f"{_ME}.Loose()", r"Loose\(...\) would run something; only a frozen"),
    (f"{_ME}.Fixed()", r"expected a function, and .*Fixed is a Fixed$"),
    ("jax.nn.relu; 1", r"import path of a function"),
    ("(" * 5000, r"import path of a function"),
  ],
)
def test_other_text_is_refused(tmp_path, monkeypatch, text, message):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setitem(sys.modules, _ME, sys.modules[__name__])
  with pytest.raises(annotations.MismatchError, match=message):
    text_values.parse_function(text)
  assert not list(tmp_path.iterdir())


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
  (tmp_path / "broken_here.py").write_text("import not_there_either\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(
    annotations.MismatchError,
    match=r"broken_here failed to import because of ModuleNotFoundError: .*eit",
  ):
    text_values.parse_function("broken_here.f")


def test_a_module_that_bazel_left_out_names_its_target(tmp_path, monkeypatch):
  folder = tmp_path / "layers" / "odd"
  folder.mkdir(parents=True)
  (folder / "kernel.py").touch()
  monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
  message = (
    r"^there is no module 'layers.odd.kernel' in this program; add"
    r" //layers/odd:kernel to the deps of its BUILD target; write the import"
  )
  with pytest.raises(annotations.MismatchError, match=message):
    text_values.parse_function("layers.odd.kernel.f")


def test_a_missing_package_names_its_extra(tmp_path, monkeypatch):
  (tmp_path / "needs_grain.py").write_text("import grain.python\n")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setitem(sys.modules, "grain", None)
  message = r"Error: .*grain.*; pip install 'paxon\[data\]' brings it$"
  with pytest.raises(annotations.MismatchError, match=message):
    text_values.parse_function("needs_grain.f")
