"""BUILD files are read as Bazel reads them; computed arguments are errors."""

import pytest

from paxon.tools.dependencies import build_file

_TEXT = '''"""A package."""

load("//tools:py.bzl", "py_library")

package(default_visibility = ["//:__subpackages__"])

# What all parts need.
_SHARED = ["@pypi//:jax"]

py_library(
    name = "stack",
    srcs = ["stack.py"],
    visibility = ["//visibility:public"],
    deps = _SHARED + [
        ":remat",
        "//sharding",
    ] + select({
        "//third_party/python:cuda": ["@pypi_cuda//:plugin"],
        "//conditions:default": ["@pypi//:jax", "@pypi//:numpy"],
    }),
)

py_test(
    name = "stack_test",
    size = "small",
    srcs = ["stack_test.py", "remat_test.py"],
    runtime_deps = ["//runner:lib"],
)
'''


def test_reads_every_edge_of_a_target():
  stack, stack_test = build_file.parse(_TEXT, "layers")
  assert stack == build_file.Target(
    label="//layers:stack",
    kind="py_library",
    package="layers",
    line=10,
    srcs=("stack.py",),
    deps=(
      "@pypi//:jax",
      "//layers:remat",
      "//sharding:sharding",
      "@pypi_cuda//:plugin",
      "@pypi//:jax",
      "@pypi//:numpy",
    ),
    optional=frozenset({"@pypi_cuda//:plugin"}),
    visibility=("//visibility:public",),
  )
  assert stack.is_public
  assert stack.build_path == "layers/BUILD"
  assert stack_test.edges == ("//runner:lib",)
  assert stack_test.source_paths() == (
    "layers/stack_test.py",
    "layers/remat_test.py",
  )
  assert stack_test.is_test
  assert stack_test.has_size
  assert stack_test.testonly
  assert stack_test.visibility == ("//:__subpackages__",)


def test_a_main_brings_the_library_and_its_experiments():
  text = 'paxon_main(name = "main", experiments = ["//tasks:all"])'
  (target,) = build_file.parse(text, "runner")
  assert target.edges == ("//runner:lib", "//tasks:all")


def test_the_root_has_no_folder():
  (target,) = build_file.parse('py_root(name = "paxon", srcs = ["a.py"])', "")
  assert target.label == "//:paxon"
  assert target.build_path == "BUILD"
  assert target.source_paths() == ("a.py",)


@pytest.mark.parametrize(
  ("label", "full"),
  [
    (":x", "//layers/moe:x"),
    ("x", "//layers/moe:x"),
    ("//sharding:axes", "//sharding:axes"),
    ("//layers/models", "//layers/models:models"),
    ("@pypi//:jax", "@pypi//:jax"),
  ],
)
def test_labels_are_written_in_full(label, full):
  assert build_file.full_label(label, "layers/moe") == full


@pytest.mark.parametrize(
  ("text", "line", "message"),
  [
    pytest.param(
      '\npy_test(name = "a", srcs = glob(["*.py"]))',
      2,
      "glob hides files; list them",
      id="glob",
    ),
    pytest.param(
      'py_test(\n  name = "a",\n  deps = [x for x in []])',
      3,
      "`[x for x in []]` is computed; write it out",
      id="comprehension",
    ),
    pytest.param(
      '[py_test(name = n) for n in ["a"]]',
      1,
      "write the targets out",
      id="targets of a loop",
    ),
    pytest.param(
      "py_test(name = NAME)", 1, "`NAME` is computed", id="unknown name"
    ),
    pytest.param("py_test()", 1, "py_test needs a literal name", id="no name"),
    pytest.param(
      'py_test("a")', 1, "name every argument", id="positional argument"
    ),
    pytest.param(
      'py_test(name = "a", deps = "b")',
      1,
      "deps must be a list of strings",
      id="a string for a list",
    ),
    pytest.param(
      'py_test(name = "a", deps = select(["b"]))',
      1,
      "select needs a literal dict",
      id="select of a list",
    ),
    pytest.param(
      'py_test(name = "a", deps = select({"b": "c"}))',
      1,
      "select may choose between lists only",
      id="select of strings",
    ),
    pytest.param("py_test(", 1, "syntax: '(' was never closed", id="syntax"),
  ],
)
def test_rejects_computed_arguments(text, line, message):
  with pytest.raises(build_file.BuildFileError) as caught:
    build_file.parse(text, "layers")
  assert message in str(caught.value)
  assert caught.value.line == line
