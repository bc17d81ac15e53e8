"""The one door to Bazel's Python rules: `py_library`, `py_test`, `py_binary`.

All three add the root package, so that `import paxon` is ours and not an
installed copy, and refuse what Bazel would do behind the author's back. A
change of Bazel, or of its rules, is a change of this file.
"""

load(
    "@rules_python//python:defs.bzl",
    _py_binary = "py_binary",
    _py_library = "py_library",
    _py_test = "py_test",
)
load("//third_party/python:accelerator.bzl", "accelerator_wheels", "full_label")
load("//tools:root_package.bzl", "root_package")

_ROOT = Label("//:paxon")
_PYTEST_MAIN = Label("//tools:pytest_main.py")
_README = "README.md"
_README_EXAMPLES = Label("//tools:run_readme_examples.py")
_README_DEPS = [Label("//tools/dependencies:imports")]
_RUNNER_DEPS = [
    Label("@pypi//:beartype"),
    Label("@pypi//:jaxtyping"),
    Label("@pypi//:pytest"),
    Label("//tools:type_checks"),
]

_XLA_FLAGS = [
    "--xla_llvm_disable_expensive_passes=true",
    # The older emitters give LLVM less to do. The flag that names them is not
    # in every jaxlib; this option is.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    # Programs this small are compiled faster in one piece.
    "--xla_cpu_parallel_codegen_split_count=1",
]

# By default, the devices of a process may start independent collectives in
# different orders, and wait for each other forever. This prevents it in some
# programs and causes it in others (docs/design/0028).
_OTHER_SCHEDULE = "--xla_cpu_enable_concurrency_optimized_scheduler=false"

def _joined(deps, *added):
    """Returns `deps` and what is added, each label once; Bazel wants it so.

    A select cannot be looked into; it must hold nothing of what is added.
    """
    is_select = type(deps) != type([])
    result = [] if is_select else list(deps)
    seen = {full_label(dep): None for dep in result}
    for label in [label for labels in added for label in labels]:
        if full_label(label) not in seen:
            seen[full_label(label)] = None
            result.append(label)
    return deps + result if is_select else result

def py_root(name, srcs, **kwargs):
    """The root package itself; only the workspace's top BUILD has one."""
    root_package(name = name, srcs = srcs, **kwargs)

def py_library(name, srcs = [], deps = [], runtime_deps = [], **kwargs):
    """A Python module.

    Args:
      name: The module's name.
      srcs: Its file.
      deps: What it imports, exactly.
      runtime_deps: What it needs without importing it by name.
      **kwargs: As for Bazel's py_library.
    """
    _py_library(
        name = name,
        srcs = srcs,
        deps = _joined(deps, runtime_deps, [_ROOT]),
        **kwargs
    )

def py_test(
        name,
        srcs,
        size,
        deps = [],
        runtime_deps = [],
        args = [],
        data = [],
        devices = 8,
        optimize = True,
        keep_compilations = None,
        machine_code = True,
        nightly = False,
        other_schedule = False,
        env = {},
        tags = [],
        **kwargs):
    """Test files, run by pytest in one process.

    Args:
      name: The target's name.
      srcs: One or more `x_test.py`; `README.md` runs its ```python blocks.
      size: Bazel's size, which is also the time limit.
      deps: What the files import, exactly, less pytest and the root package.
      runtime_deps: What they need without importing it by name.
      args: More arguments for pytest.
      data: As for Bazel's py_test.
      devices: How many CPU devices JAX shows.
      optimize: False where XLA shall not optimize at all: it then compiles
        in half the time, but sums are rounded otherwise, which the tightest
        tolerances see, and long computations are slower.
      keep_compilations: Whether processes that the test starts share what it
        compiles, and keep it for its next run; by default only its own process
        does. False compiles all again, for tests that read what the compiler
        prints.
      machine_code: False where of programs for absent GPUs only the text and
        the sizes are read: CUDA's assembler is then left out.
      nightly: True where `bazel test //...` leaves the whole target to
        `--config=all`. Single cases are marked in the test file, by
        `@pytest.mark.nightly`.
      other_schedule: True turns off XLA's concurrency-optimized schedule, with
        which the programs of this test have deadlocked.
      env: More environment variables; these win over the macro's own.
      tags: As for Bazel's py_test.
      **kwargs: As for Bazel's py_test, such as `shard_count`.
    """
    readme = [_README] if _README in srcs else []
    files = [
        str(_README_EXAMPLES) if src == _README else src
        for src in srcs
    ]
    more_deps = [_RUNNER_DEPS, [_ROOT]] + ([_README_DEPS] if readme else [])
    joined = _joined(deps, runtime_deps, *more_deps)
    _py_test(
        name = name,
        size = size,
        srcs = files + [_PYTEST_MAIN],
        main = _PYTEST_MAIN,
        args = ["$(rootpath %s)" % file for file in files] + args,
        data = data + readme,
        env = dict({
            "JAX_NUMPY_DTYPE_PROMOTION": "strict",
            "JAX_NUMPY_RANK_PROMOTION": "raise",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_PLATFORMS": "cpu",
            "PAXON_ALL_NIGHTLY": "1" if nightly else "",
            "PAXON_KEEP_COMPILATIONS": {True: "1", False: "0"}.get(keep_compilations, ""),
            "PAXON_NO_MACHINE_CODE": "" if machine_code else "1",
            "PAXON_README": "$(rootpath %s)" % _README if readme else "",
            "PYTHONSAFEPATH": "1",
            # Half of a test's time is XLA's compiling; its last optimizations
            # of CPU code take half of that, and tests run programs once.
            "XLA_FLAGS": " ".join(_XLA_FLAGS + [
                "--xla_backend_optimization_level=%d" % (1 if optimize else 0),
            ] + ([_OTHER_SCHEDULE] if other_schedule else [])),
        }, **env),
        legacy_create_init = 0,
        tags = tags + (["nightly"] if nightly else []),
        deps = joined + accelerator_wheels(
            joined if type(joined) == type([]) else [],
        ),
        **kwargs
    )

def _launcher(ctx):
    output = ctx.actions.declare_file(ctx.label.name + ".py")
    ctx.actions.expand_template(
        template = ctx.file._template,
        output = output,
        substitutions = {"{main}": ctx.file.main.basename},
    )
    return [DefaultInfo(files = depset([output]))]

_py_launcher = rule(
    implementation = _launcher,
    attrs = {
        "main": attr.label(mandatory = True, allow_single_file = [".py"]),
        "_template": attr.label(
            default = Label("//tools:launcher.py.tpl"),
            allow_single_file = True,
        ),
    },
)

def py_binary(name, srcs, main = None, deps = [], runtime_deps = [], **kwargs):
    """A Python program.

    It starts as a test does: the folder of its main file is not on
    `sys.path`, so it can import only what it declares.

    Args:
      name: The target's name.
      srcs: Its files.
      main: The file to run, `name.py` by default.
      deps: What the files import, exactly.
      runtime_deps: What they need without importing it by name.
      **kwargs: As for Bazel's py_binary.
    """
    launcher = "_%s_launcher" % name
    _py_launcher(
        name = launcher,
        main = main or name + ".py",
        testonly = kwargs.get("testonly", False),
        visibility = ["//visibility:private"],
    )
    joined = _joined(deps, runtime_deps, [_ROOT])
    _py_binary(
        name = name,
        srcs = srcs + [launcher],
        main = launcher + ".py",
        legacy_create_init = 0,
        deps = joined + accelerator_wheels(joined),
        **kwargs
    )
