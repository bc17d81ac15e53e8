"""Runfiles of a test, to see the files that a dependency adds."""

import os
import pathlib


def root() -> pathlib.Path:
  """Returns the folder of everything that the running test depends on."""
  return pathlib.Path(os.environ["TEST_SRCDIR"])


def wheels() -> set[str]:
  """Returns the top-level modules of all Python distributions."""
  return {
    path.stem for path in root().glob("*pypi*/site/*") if path.suffix != ".libs"
  }


def packages() -> set[str]:
  """Returns the folders of Paxon that have a module here."""
  (paxon,) = (
    path for path in root().glob("paxon*") if (path / "sharding").exists()
  )
  return {
    path.relative_to(paxon).parts[0] for path in paxon.glob("[!_]*/**/*.py")
  }


def assert_no_tensorflow() -> None:
  """Fails if anything of TensorFlow is here."""
  found = {name for name in wheels() if name.startswith("tensorflow")}
  assert "jax" in wheels(), "the runfiles are not where they are sought"
  assert not found, f"TensorFlow came along: {sorted(found)}"
  assert not [*root().glob("*pypi_tf")], "@pypi_tf came along"
