"""Names the packages of `paxon`; everything else is in pyproject.toml.

The checkout itself is the package `paxon`, whatever its folder is called, so
the packages cannot be found by searching for a folder of that name.
"""

import atexit
import pathlib
import re
import shutil
import tempfile

import setuptools
from setuptools.command import build_py

_ROOT = pathlib.Path(__file__).parent
# Not ./build, whose modules of an earlier build would get into the wheel.
_BUILD = tempfile.mkdtemp()
atexit.register(shutil.rmtree, _BUILD, ignore_errors=True)
# Only for work on this repository.
_NOT_INSTALLED = {
  "paxon.setup",
  "paxon.third_party",
  "paxon.tools.check_deps",
  "paxon.tools.dependencies",
  "paxon.tools.dependency_budget",
  "paxon.tools.part_wheel",
  "paxon.tools.releasing",
  "paxon.tools.size_table",
}
_TESTONLY = re.compile(r'testonly = True,\n +srcs = \["(\w+)\.py"\]')


def find_packages(folder: pathlib.Path, name: str = "paxon") -> list[str]:
  """Returns the package in a folder and those below it.

  What builds and runs leave in a checkout is skipped: Bazel's links lead to
  copies of every package, and `build/` and `runs/` are not packages.
  """
  found = [name]
  for path in sorted(folder.iterdir()):
    inner = f"{name}.{path.name}"
    if (
      path.name.isidentifier()
      and not path.is_symlink()
      and (path / "__init__.py").is_file()
      and inner not in _NOT_INSTALLED
    ):
      found += find_packages(path, inner)
  return found


class _WithoutTests(build_py.build_py):
  """Excludes tests, their support, and this repository's checks."""

  def find_package_modules(
    self, package: str, package_dir: str
  ) -> list[tuple[str, str, str]]:
    build = pathlib.Path(package_dir, "BUILD")
    testonly = _TESTONLY.findall(build.read_text()) if build.exists() else []
    return [
      (package, module, file)
      for package, module, file in super().find_package_modules(
        package, package_dir
      )
      if not module.endswith("_test")
      and module not in testonly
      and f"{package}.{module}" not in _NOT_INSTALLED
    ]


setuptools.setup(
  packages=find_packages(_ROOT),
  package_dir={"paxon": "."},
  cmdclass={"build_py": _WithoutTests},
  options={"build": {"build_base": _BUILD}},
)
