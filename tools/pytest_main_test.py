"""Types and shapes are checked in tests; tiers; kept compilations."""

from collections.abc import Iterator
import dataclasses
import os
import subprocess
import sys

import jax
import jaxtyping
import numpy as np
import pytest

from paxon.layers import feed_forward
from paxon.layers.stacks import stack
from paxon.tools import pytest_main, type_checks


def test_modules_are_loaded_with_checks():
  with pytest.raises(jaxtyping.TypeCheckError, match="argv=3"):
    pytest_main.main(3)  # pyrefly: ignore[bad-argument-type]


def test_a_result_is_checked():
  @type_checks.check_types
  def text(x: int) -> str:
    return str(x) if x else x  # pyrefly: ignore[bad-return]

  assert text(1) == "1"
  with pytest.raises(jaxtyping.TypeCheckError):
    text(0)


def test_shapes_are_those_of_the_other_arguments():
  vector = jaxtyping.Float[np.ndarray, " n"]

  @type_checks.check_types
  def total(x: vector, y: vector) -> vector:
    return x + y

  assert total(np.ones(3), np.ones(3)).shape == (3,)
  with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'y'"):
    total(np.ones(3), np.ones(1))


def test_fields_of_dataclasses_are_checked():
  @type_checks.check_types
  @dataclasses.dataclass
  class Point:
    x: int

  assert Point(1) == Point(1)
  with pytest.raises(jaxtyping.TypeCheckError, match="parameter x='1'"):
    Point("1")  # pyrefly: ignore[bad-argument-type]


def test_generators_are_checked():
  @type_checks.check_types
  def count(n: int) -> Iterator[int]:
    yield from range(n)

  assert list(count(2)) == [0, 1]
  with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'n'"):
    count("2")  # pyrefly: ignore[bad-argument-type]


def test_layers_are_checked():
  """Flax makes the `__init__` of a module, and wraps its methods."""
  block = feed_forward.GatedFeedForward(8)
  assert stack.Stack([block], num_layers=4).num_layers == 4
  with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'num_layers'"):
    stack.Stack([block], num_layers="4")  # pyrefly: ignore[bad-argument-type]
  with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'x'"):
    jax.eval_shape(block.init, jax.random.key(0), np.ones((2, 3), np.float32))


def test_nested_functions_are_checked_if_they_have_shapes():
  vector = jaxtyping.Float[np.ndarray, " n"]

  @type_checks.inner
  def length(x: vector) -> int:
    return len(x)

  assert length(np.ones(3)) == 3
  with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'x'"):
    length(np.ones((3, 1)))

  def same(x: int) -> int:
    return x

  assert type_checks.inner(same) is same


def test_functions_and_classes_are_decorated():
  source = """
def outer():
  class Inside:
    def method(self): pass
  def inside():
    if True:
      def deeper(): pass
    deeper()
  inside()
  return Inside
class Outside:
  @staticmethod
  def method(): pass
try:
  def tried(): pass
finally:
  outer()
"""
  found: dict[str, set[str]] = {
    "__checked__": set(),
    "__checked_inner__": set(),
  }

  def noted(name: str):
    return lambda made: found[name].add(made.__qualname__) or made

  tree = type_checks.decorate(source, "source.py")
  exec(compile(tree, "source.py", "exec"), {n: noted(n) for n in found})
  inside = "outer.<locals>."
  assert found == {
    "__checked__": {"outer", "Outside", "Outside.method", "tried"},
    "__checked_inner__": {
      f"{inside}Inside",
      f"{inside}Inside.method",
      f"{inside}inside",
      f"{inside}inside.<locals>.deeper",
    },
  }


_CASES = """
import pytest

@pytest.mark.nightly
def test_marked(): pass

@pytest.mark.parametrize(
  "x", [1, 2, 3, pytest.param(4, marks=pytest.mark.nightly)]
)
def test_grid(x): pass

@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("x", range(7))
def test_kept(x): assert x not in (1, 2, 4, 5)
"""


def _run(file, **environ: str):
  return subprocess.run(
    [sys.executable, pytest_main.__file__, file],
    env={**os.environ, "XML_OUTPUT_FILE": "", **environ},
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize(
  ("tier", "all_nightly", "counts"),
  [
    ("", "", "6 passed, 6 deselected"),
    ("", "1", "12 deselected"),
    ("nightly", "", "4 failed, 2 passed, 6 deselected"),
    ("nightly", "1", "4 failed, 8 passed"),
    ("all", "", "4 failed, 8 passed"),
  ],
)
def test_a_tier_runs_its_cases_only(tier, all_nightly, counts, tmp_path):
  file = tmp_path / "cases_test.py"
  file.write_text(_CASES)
  run = _run(
    file,
    **{pytest_main.TIER: tier, pytest_main.ALL_NIGHTLY: all_nightly},
  )
  assert (run.returncode != 0) == ("failed" in counts), run.stdout + run.stderr
  assert counts in run.stdout
  left_out = {"6 passed, 6 deselected": 6, "12 deselected": 12}.get(counts)
  message = pytest_main.LEFT_OUT.format(left_out)
  assert (message in run.stdout) == (left_out is not None)


def test_a_file_without_marks_has_no_nightly_tier(tmp_path):
  file = tmp_path / "cases_test.py"
  file.write_text("raise RuntimeError('it is not imported')")
  assert _run(file, **{pytest_main.TIER: "nightly"}).returncode == 0
  assert _run(file, **{pytest_main.TIER: ""}).returncode != 0


_COMPILING = """
import jax, jaxtyping, os, pathlib, pytest

from paxon.layers import feed_forward

def test_compiles():
  with pytest.raises(jaxtyping.TypeCheckError):
    feed_forward.GatedFeedForward("8")
  jax.jit(lambda x: x + 1)(jax.numpy.ones(7)).block_until_ready()
  assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
"""


def test_compiled_programs_are_kept_on_the_machine(tmp_path):
  file = tmp_path / "cases_test.py"
  file.write_text(_COMPILING)
  environ = {
    type_checks.COMPILATIONS: str(tmp_path / "kept"),
    pytest_main.KEEP_COMPILATIONS: "",
    "TEST_TARGET": "//a/b:c_test",
    "TEST_TMPDIR": str(tmp_path / "scratch"),
  }
  assert not _run(file, **environ).returncode
  (bytecode,) = (tmp_path / "kept" / "bytecode").glob("*.feed_forward.*.pyc")
  assert bytecode.stat().st_size
  (programs,) = (tmp_path / "kept").glob("*/a_b_c_test_0/programs")
  files = [*programs.iterdir(), bytecode]
  assert len(files) > 1
  times = [path.stat().st_mtime_ns for path in files]
  assert not _run(file, **environ).returncode
  assert [path.stat().st_mtime_ns for path in files] == times
  # A target that must compile all again keeps nothing.
  environ |= {pytest_main.KEEP_COMPILATIONS: "0", "TEST_TARGET": "//a:other"}
  assert not _run(file, **environ).returncode
  assert not [*(tmp_path / "kept").glob("*/a_other_0")]
