"""Stand-ins for repositories that Bazel 4 would download, or lacks.

Bazel 4.2.3 (Debian's `bazel-bootstrap`) declares rules_cc, rules_java and
remote_coverage_tools at the end of every WORKSPACE and loads them even for
Python, from hosts that need not be reachable. BUILD files of ours and of our
users load rules_python, because Bazel 8 lost the rules that are built into
Bazel 4. A repository that exports the built-in rules is enough. A WORKSPACE
that declares its own before calling us keeps its own.
"""

_RULES_CC = ["binary", "import", "library", "proto_library", "test", "toolchain", "toolchain_suite"]

_RULES_JAVA = [
    "binary",
    "import",
    "library",
    "lite_proto_library",
    "package_configuration",
    "plugin",
    "proto_library",
    "runtime",
    "test",
    "toolchain",
]

def _exports(prefix, rules):
    return "".join(["%s_%s = native.%s_%s\n" % (prefix, rule, prefix, rule) for rule in rules])

_FILES = {
    "rules_cc": {
        "cc/BUILD.bazel": "",
        "cc/defs.bzl": _exports("cc", _RULES_CC) + "objc_library = native.objc_library\n",
    },
    "rules_java": {
        "java/BUILD.bazel": "",
        "java/defs.bzl": _exports("java", _RULES_JAVA),
    },
    "rules_python": {
        "python/BUILD.bazel": "",
        "python/defs.bzl": "\n".join([
            'load("@bazel_tools//tools/python:toolchain.bzl", _pair = "py_runtime_pair")',
            "py_runtime_pair = _pair",
        ]) + "\n" + _exports("py", ["binary", "library", "runtime", "test"]),
    },
    "remote_coverage_tools": {
        "BUILD.bazel": "".join([
            'filegroup(name = "%s", visibility = ["//visibility:public"])\n' % name
            for name in ["coverage_report_generator", "coverage_output_generator"]
        ]),
    },
}

def _stand_in(ctx):
    ctx.file("WORKSPACE", 'workspace(name = "%s")\n' % ctx.name)
    for path, text in ctx.attr.files.items():
        ctx.file(path, text)

_stand_in_repository = repository_rule(
    implementation = _stand_in,
    attrs = {"files": attr.string_dict(mandatory = True)},
)

def bazel4_stand_ins():
    """Declares the stand-ins, under Bazel 4 only."""

    # Debian's build calls itself `no_version`, which reads as an empty string.
    if native.bazel_version and not native.bazel_version.startswith("4."):
        return
    for name, files in _FILES.items():
        if not native.existing_rule(name):
            _stand_in_repository(name = name, files = files)
