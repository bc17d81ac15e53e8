"""`paxon_main`: a program that launches the experiments it is given.

In the BUILD file of any repository that knows this one as `@paxon`:

    load("@paxon//runner:main.bzl", "paxon_main")

    paxon_main(
        name = "main",
        experiments = ["//experiments:all"],
        packages = ["experiments"],
    )

    bazel run //:main -- --exp=experiments.mine.Mine
"""

load("//tools:py.bzl", "py_binary")

# A label of this repository, whoever calls the macro.
_LIB = Label("//runner:lib")

_SOURCE = '''"""Launches the experiments of {packages}."""

from paxon.runner import main

main.run(packages={packages})
'''

def _main_source_impl(ctx):
    ctx.actions.write(ctx.outputs.source, ctx.attr.text)
    return [DefaultInfo(files = depset([ctx.outputs.source]))]

_main_source = rule(
    implementation = _main_source_impl,
    attrs = {
        "source": attr.output(mandatory = True),
        "text": attr.string(mandatory = True),
    },
)

def paxon_main(name, experiments, packages, **kwargs):
    """A program with the command line of Paxon's own `//runner:main`.

    Args:
      name: The target's name.
      experiments: The targets that hold experiments, with what they import.
      packages: Import paths of the Python packages that `--list` searches.
      **kwargs: As for Bazel's py_binary, such as `visibility` and `data`.
    """
    if not packages:
        fail("paxon_main %s: packages is empty; name the Python packages of its experiments." % name)
    source = name + "_main.py"
    _main_source(
        name = "_%s_source" % name,
        source = source,
        testonly = kwargs.get("testonly", False),
        text = _SOURCE.format(packages = repr(packages)),
        visibility = ["//visibility:private"],
    )
    py_binary(
        name = name,
        srcs = [source],
        main = source,
        runtime_deps = experiments,
        deps = [_LIB],
        **kwargs
    )
