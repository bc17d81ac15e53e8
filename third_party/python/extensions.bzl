"""The module extension: the same repositories as in a WORKSPACE, for a MODULE.bazel.

    paxon = use_extension("@paxon//third_party/python:extensions.bzl", "paxon")
    paxon.lock(name = "pypi_lab", lock = "//:requirements_lock.txt")
    use_repo(paxon, "paxon_python", "pypi", "pypi_lab")
    register_toolchains("@paxon_python//:all")
"""

load(":repositories.bzl", "declare_repositories", "paxon_lock")

def _find_interpreter(module_ctx):
    """Returns the label of the one `paxon.python`, or None."""
    found = None
    for module in module_ctx.modules:
        for tag in module.tags.python:
            if not module.is_root:
                fail(("paxon.python in the module %s: only the root module chooses " +
                      "the Python; use_extension with dev_dependency = True.") % module.name)
            if found:
                fail("paxon.python is used twice: %s, %s; name one interpreter." %
                     (found, tag.interpreter))
            found = tag.interpreter
    return found

def _paxon(module_ctx):
    declare_repositories(interpreter = _find_interpreter(module_ctx))
    owners = {}
    for module in module_ctx.modules:
        earlier = {}
        for tag in module.tags.lock:
            if tag.name in owners:
                fail("paxon.lock(name = \"%s\") is in the module %s and in %s; names must differ." %
                     (tag.name, owners[tag.name], module.name))
            owners[tag.name] = module.name
            paxon_lock(
                name = tag.name,
                lock = tag.lock,
                bases = tag.bases,
                base_locks = earlier,
                from_source = tag.from_source,
                substitutes = tag.substitutes,
            )
            earlier[tag.lock] = tag.name

_lock = tag_class(
    doc = """A repository of the packages of your own lock.

What Paxon's core lock or an earlier one of yours has is used from there; the
versions must agree.""",
    attrs = {
        "bases": attr.string_list(
            doc = "More repositories of Paxon whose packages are used, such as `pypi_text`.",
        ),
        "from_source": attr.string_list(
            doc = "Packages that may be built, for want of a wheel.",
        ),
        "lock": attr.label(
            mandatory = True,
            doc = "Pins with hashes, as `uv pip compile --generate-hashes` writes.",
        ),
        "name": attr.string(
            mandatory = True,
            doc = "The repository's name, such as `pypi_lab`.",
        ),
        "substitutes": attr.string_dict(
            doc = "Left-out package to the one that stands in for it, or to nothing.",
        ),
    },
)

_python = tag_class(
    doc = "The base interpreter, instead of PAXON_PYTHON or `python3` of the machine.",
    attrs = {
        "interpreter": attr.label(
            mandatory = True,
            doc = "Its label, such as `@python_3_12_host//:python` of rules_python.",
        ),
    },
)

paxon = module_extension(
    implementation = _paxon,
    tag_classes = {"lock": _lock, "python": _python},
)
