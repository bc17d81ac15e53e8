"""The external repositories: the Python interpreter and the locked wheels.

A WORKSPACE, ours or one that depends on us, calls `paxon_repositories()`; a
MODULE.bazel uses the extension of extensions.bzl, which declares the same.
Each repository is fetched when a target first needs it, and never otherwise:

  @paxon_python     the interpreter: an isolated virtual environment
  @pypi             core: JAX, Flax, optax, orbax, Fiddle, pytest ...
  @pypi_data        Grain, ArrayRecord, Parquet, Hugging Face datasets
  @pypi_tf          TensorFlow (CPU), SeqIO and what they need
  @pypi_plan_cuda   JAX's CUDA plugin alone: it compiles for absent GPUs
  @pypi_plan_cudnn  what it needs besides to compile cuDNN attention
  @pypi_cuda        JAX's CUDA plugin with its run time
  @pypi_privacy     dp-accounting: epsilon of differential privacy
  @pypi_serve       starlette, uvicorn, llguidance: --mode=serve; gguf
  @pypi_site        Sphinx, MyST and Furo: tools/site
  @pypi_servers     SeaweedFS, a store that tests start
  @pypi_stores      gcsfs, s3fs, adlfs: object stores
  @pypi_text        tokenizers, SentencePiece, tiktoken, Jinja2
  @pypi_tpu         JAX's TPU run time, which also compiles for absent TPUs
  @pypi_oracle      what tests compare with (torch, transformers)
"""

load(":bazel4.bzl", "bazel4_stand_ins")

_VERSIONS = ["3.11", "3.12", "3.13"]

# pip reads the rest of its environment (index, proxy, certificates) by itself,
# and what it brings is fixed by hashes: a change there fetches nothing again.
_ENVIRONMENT = {
    "PYTHONHOME": "",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "",
}

_INTERPRETER_BUILD = """\
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    files = ["environment/pyvenv.cfg"],
    interpreter = "environment/bin/python3",
    python_version = "PY3",
    stub_shebang = "#!{base}",
)

py_runtime_pair(
    name = "pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

# Later rules_python look for this toolchain too, and without ours would download
# a Python for it.
_EXEC_TOOLS = "py_exec_tools_toolchain"

_EXEC_TOOLS_BUILD = """
load("@rules_python//python:{name}.bzl", "{name}")

{name}(name = "exec_tools")

toolchain(
    name = "exec_tools_toolchain",
    toolchain = ":exec_tools",
    toolchain_type = "@rules_python//python:exec_tools_toolchain_type",
)
""".format(name = _EXEC_TOOLS)

# pip as the interpreter brings it. `venv` starts pip to install it, which takes
# three seconds that everything else waits for; a wheel need only be unpacked.
_UNPACK_PIP = """\
import ensurepip, pathlib, sysconfig, zipfile
folder = sysconfig.get_config_var("WHEEL_PKG_DIR")
folder = folder or pathlib.Path(ensurepip.__file__).parent / "_bundled"
(wheel,) = pathlib.Path(folder).glob("pip-*.whl")
zipfile.ZipFile(wheel).extractall(sysconfig.get_path("purelib"))
"""

# install.py's exit status for a lock that cannot be installed as it stands.
_LOCK_ERROR = 3

def _run(ctx, arguments, timeout = 600, python_path = ""):
    return ctx.execute(
        arguments,
        timeout = timeout,
        environment = dict(_ENVIRONMENT, PYTHONPATH = python_path),
    )

def _find_python(ctx):
    """Returns the base interpreter's path; fails where none will do."""
    wanted = ctx.os.environ.get("PAXON_PYTHON", "")
    remedy = "name it in PAXON_PYTHON=/path/to/python3.11"
    if ctx.attr.interpreter:
        python = ctx.path(ctx.attr.interpreter)
        remedy = "name its label in paxon.python(interpreter = ...)"
    elif wanted.startswith("/"):
        python = wanted
    else:
        python = ctx.which(wanted or "python3")
    if not python:
        fail(("no `%s` on the PATH: install Python %s (Debian: apt-get install " +
              "python3 python3-venv), or name one in PAXON_PYTHON.") %
             (wanted or "python3", " or ".join(_VERSIONS)))
    result = _run(ctx, [python, "-c", "\n".join([
        "import os, sys",
        "print('%d.%d' % sys.version_info[:2])",
        "print(os.path.realpath(sys.executable))",
        "print(sys.implementation.name)",
    ])])
    if result.return_code:
        fail("`%s` does not run: %s" % (python, result.stderr))
    version, path, implementation = result.stdout.strip().split("\n")
    if version not in _VERSIONS or implementation != "cpython":
        fail("`%s` is %s %s, and Paxon needs CPython %s: install one, and %s." %
             (python, implementation, version, ", ".join(_VERSIONS), remedy))
    return path

def _python_interpreter(ctx):
    base = _find_python(ctx)

    # One environment with pip to install with, one with nothing at all to run
    # in: neither pip nor the machine's site-packages can be imported there.
    result = _run(ctx, [base, "-m", "venv", "--without-pip", "installer"])
    if not result.return_code:
        pip = [ctx.path("installer/bin/python3"), "-c", _UNPACK_PIP]
        result = _run(ctx, pip)
    if result.return_code:
        # An interpreter that keeps its wheel elsewhere, or has none.
        result = _run(ctx, [base, "-m", "venv", "--clear", "installer"])
    if result.return_code:
        fail(("`%s -m venv` failed: install the `venv` and `ensurepip` modules " +
              "of that Python (Debian: apt-get install python3-venv), then run " +
              "Bazel again.\n%s%s") % (base, result.stdout, result.stderr))
    result = _run(ctx, [base, "-m", "venv", "--without-pip", "environment"])
    if result.return_code:
        fail("`%s -m venv --without-pip` failed:\n%s" % (base, result.stderr))
    text = _INTERPRETER_BUILD.format(base = base)
    rules = ctx.path(Label("@rules_python//python:defs.bzl")).dirname
    if rules.get_child(_EXEC_TOOLS + ".bzl").exists:
        text += _EXEC_TOOLS_BUILD
    ctx.file("BUILD.bazel", text)

python_interpreter = repository_rule(
    implementation = _python_interpreter,
    doc = "An isolated Python, registered as the toolchain of every target.",
    attrs = {
        "interpreter": attr.label(
            allow_single_file = True,
            doc = "The base interpreter, by default PAXON_PYTHON or `python3`.",
        ),
    },
    environ = ["PAXON_PYTHON"],
)

def _find_file(ctx, label):
    """Returns the path of a file; a change of it fetches the repository again."""
    path = ctx.path(label)
    if hasattr(ctx, "watch"):
        # Bazel 8 does not do it by itself.
        ctx.watch(path)
    return path

def _python_wheels(ctx):
    interpreter = ctx.path(Label("@paxon_python//:BUILD.bazel")).dirname
    python = str(interpreter) + "/installer/bin/python3"
    vendored = _run(ctx, [python, "-c", "import pip._vendor as v; print(*v.__path__)"])
    arguments = [python, _find_file(ctx, ctx.attr._install), "--lock", _find_file(ctx, ctx.attr.lock)]
    if ctx.attr.base_lock:
        # Not @pypi itself: the two are made at the same time.
        arguments += ["--base-lock", "pypi=%s" % _find_file(ctx, ctx.attr.base_lock)]
    for lock, repository in ctx.attr.more_base_locks.items():
        arguments += ["--base-lock", "%s=%s" % (repository, _find_file(ctx, lock))]
    for name, other in ctx.attr.substitutes.items():
        arguments += ["--substitute", "%s=%s" % (name, other)]
    for name in ctx.attr.from_source:
        arguments += ["--from-source", name]
    if ctx.attr.from_source:
        arguments += ["--build-tools", _find_file(ctx, ctx.attr._build_tools)]
    ctx.report_progress("pip installs " + ctx.attr.lock.name)
    result = _run(ctx, arguments, timeout = 7200, python_path = vendored.stdout.strip())
    if result.return_code == _LOCK_ERROR:
        fail("%s: %s" % (ctx.attr.lock, result.stderr.strip()))
    if result.return_code:
        fail(("cannot install %s (is the package index reachable? pip's own " +
              "settings, PIP_INDEX_URL, PIP_CERT and the like, are honoured):\n%s\n%s") %
             (ctx.attr.lock, result.stdout[-2000:], result.stderr[-4000:]))

python_wheels = repository_rule(
    implementation = _python_wheels,
    doc = "The distributions of one lock, each a separate strict target.",
    attrs = {
        "lock": attr.label(
            mandatory = True,
            allow_single_file = True,
            doc = "Pins with hashes, made by update_locks.sh.",
        ),
        "base_lock": attr.label(
            allow_single_file = True,
            doc = "The lock of @pypi, whose distributions are used from there.",
        ),
        "more_base_locks": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "More of these, to the names of their repositories.",
        ),
        "substitutes": attr.string_dict(
            doc = "Left-out distribution to the one that stands in for it.",
        ),
        "from_source": attr.string_list(
            doc = "Distributions that may be built, for want of a wheel.",
        ),
        "_build_tools": attr.label(
            default = Label("//third_party/python:build_tools.txt"),
            allow_single_file = True,
        ),
        "_install": attr.label(
            default = Label("//third_party/python:install.py"),
            allow_single_file = True,
        ),
    },
)

# The repositories of our locks -> what `python_wheels` needs to know of each.
_CORE = "pypi"

_LOCKS = {
    _CORE: {},
    "pypi_cuda": {},
    "pypi_data": {},
    "pypi_lm_eval": {
        # They have no wheels.
        "from_source": ["rouge_score", "sqlitedict", "word2number"],
        # It downloads metrics, and nothing is downloaded here.
        "substitutes": {"evaluate": ""},
    },
    # A gigabyte that torch imports only to compile for a GPU.
    "pypi_oracle": {"substitutes": {"cuda_bindings": "", "triton": ""}},
    "pypi_plan_cuda": {},
    # Half a gigabyte that only a run needs.
    "pypi_plan_cudnn": {"substitutes": {"nvidia_cublas": ""}},
    "pypi_privacy": {},
    # gguf downloads with one and shows progress with the other.
    "pypi_serve": {"substitutes": {"requests": "", "tqdm": ""}},
    "pypi_servers": {},
    "pypi_site": {},
    "pypi_stores": {},
    # They only download, and nothing is downloaded here.
    "pypi_text": {"substitutes": {"huggingface_hub": "", "requests": ""}},
    "pypi_tf": {
        # The first has no wheel at all, the second none for Python 3.13.
        "from_source": ["promise", "editdistance"],
        "substitutes": {"tensorflow": "tensorflow_cpu"},
    },
    "pypi_tpu": {},
}

def _find_lock(repository):
    if repository not in _LOCKS:
        fail("bases: `%s` is none of Paxon's repositories: %s." % (repository, ", ".join(sorted(_LOCKS))))
    return Label("//third_party/python:requirements%s_lock.txt" % repository[len(_CORE):])

def paxon_lock(name, lock, bases = [], base_locks = {}, **kwargs):
    """A repository of the packages of your own lock.

    What Paxon's core lock has is used from `@pypi`, in the same version.

    Args:
      name: The repository's name.
      lock: The label of the lock: pins with hashes.
      bases: More repositories of Paxon whose packages are used, such as
        `pypi_text`. Versions must agree with theirs.
      base_locks: The same for locks of yours: labels, to names of repositories.
      **kwargs: `from_source` and `substitutes`, as for `python_wheels`.
    """
    if name in _LOCKS:
        fail("lock: the name `%s` is one of Paxon's; name it pypi_MINE." % name)
    more = {_find_lock(base): base for base in bases}
    more.update(base_locks)
    python_wheels(
        name = name,
        lock = lock,
        base_lock = _find_lock(_CORE),
        more_base_locks = more,
        **kwargs
    )

def declare_repositories(interpreter = None):
    """Declares the interpreter and the repositories of our locks.

    Args:
      interpreter: The label of the base interpreter, by default PAXON_PYTHON or
        `python3`.
    """
    python_interpreter(name = "paxon_python", interpreter = interpreter)
    for name, settings in _LOCKS.items():
        python_wheels(
            name = name,
            lock = _find_lock(name),
            base_lock = None if name == _CORE else _find_lock(_CORE),
            **settings
        )

def paxon_repositories():
    """For a WORKSPACE: all repositories, and the Python toolchain."""
    bazel4_stand_ins()
    declare_repositories()
    native.register_toolchains("@paxon_python//:toolchain")
