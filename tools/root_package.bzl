"""`root_package`: a repository whose modules are imported by its name.

    from lab.layers import residual     # //layers:residual of the repository `lab`

In a WORKSPACE the runfiles have the folder `lab/`, and nothing is needed. Where
Bazel reads MODULE.bazel instead, that folder is `_main/` or `lab+/`: so a package
of that name is generated, whose modules are the repository's. Only those in the
runfiles exist, as ever: what is not declared cannot be imported.
"""

load("@rules_python//python:defs.bzl", "py_library")

_FOLDER = "_import_root"

_SOURCE = '''"""The package `{name}`: the modules of its repository."""

import os as _os

# In place, because `__spec__` has the same list.
__path__[:] = [_os.path.dirname(_os.path.dirname(__path__[0]))]
__file__ = _os.path.join(__path__[0], "__init__.py")
if _os.path.exists(__file__):
  __spec__.origin = __file__
  with open(__file__, encoding="utf-8") as _file:
    exec(compile(_file.read(), __file__, "exec"))
'''

def _write_package(ctx):
    ctx.actions.write(ctx.outputs.source, _SOURCE.format(name = ctx.attr.package))
    return [DefaultInfo(files = depset([ctx.outputs.source]))]

_package_source = rule(
    implementation = _write_package,
    attrs = {
        "package": attr.string(mandatory = True),
        "source": attr.output(mandatory = True),
    },
)

def root_package(name, srcs = [], **kwargs):
    """The root package of a repository, on which its libraries depend.

    It stands in the BUILD file at the top.

    Args:
      name: The name that imports use, that of the repository.
      srcs: The `__init__.py` at the top, if there is one.
      **kwargs: As for py_library, such as `visibility`.
    """
    if native.package_name():
        fail("root_package %s: it must be in the BUILD file at the top of its repository, not in //%s." % (name, native.package_name()))
    if not hasattr(native, "module_name") or native.module_name() == None:
        py_library(name = name, srcs = srcs, **kwargs)
        return
    source = "%s/%s/__init__.py" % (_FOLDER, name)
    _package_source(
        name = "_%s_source" % name,
        package = name,
        source = source,
        visibility = ["//visibility:private"],
    )
    py_library(
        name = name,
        srcs = srcs + [source],
        imports = [_FOLDER],
        **kwargs
    )
