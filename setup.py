"""Names the packages of `paxon`; all else is in pyproject.toml.

The checkout itself is the package `paxon`, whatever its folder is called, so
the packages cannot be found by searching for a folder of that name.
"""

import pathlib

import setuptools
from setuptools.command import build_py

# Not part of the product: the build, its checks, and what they leave behind.
_OUTSIDE = {"tools", "third_party", "docs", "build", "dist", "runs"}


def _packages() -> list[str]:
  root = pathlib.Path(__file__).parent
  names = ["paxon"]
  for top in sorted(root.iterdir()):
    if top.name in _OUTSIDE or not (top / "__init__.py").is_file():
      continue
    for init in sorted(top.rglob("__init__.py")):
      folder = init.parent.relative_to(root)
      names.append(".".join(("paxon", *folder.parts)))
  return names


class _WithoutTests(build_py.build_py):
  """Leaves the tests, and this file, out of a wheel."""

  def find_package_modules(self, package, package_dir):
    return [
      (package, module, file)
      for package, module, file in super().find_package_modules(
        package, package_dir
      )
      if not module.endswith("_test") and (package, module) != _THIS
    ]


_THIS = ("paxon", "setup")

setuptools.setup(
  packages=_packages(),
  package_dir={"paxon": "."},
  cmdclass={"build_py": _WithoutTests},
)
