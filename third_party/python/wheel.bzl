"""The rule behind each target of the Python repositories."""

load("@rules_python//python:defs.bzl", "py_library")

def wheel(name, data = [], deps = []):
    """One installed distribution.

    Args:
      name: The distribution, lower case, `_` for `-`.
      data: Its own folders and files below `site/`. A folder is one symlink
        in the runfiles, however many files it holds.
      deps: The distributions that it requires.
    """
    py_library(
        name = name,
        data = ["site/" + path for path in data],
        imports = ["site"],
        deps = deps,
    )
