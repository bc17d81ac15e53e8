"""The external repositories: the Python interpreter and the locked wheels.

A WORKSPACE, ours or one that depends on us, calls `paxon_repositories()`.
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
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

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

# pip as the interpreter brings it. `venv` starts pip to install it, which takes
# three seconds that everything else waits for; a wheel need only be unpacked.
_UNPACK_PIP = """\
import ensurepip, pathlib, sysconfig, zipfile
folder = sysconfig.get_config_var("WHEEL_PKG_DIR")
folder = folder or pathlib.Path(ensurepip.__file__).parent / "_bundled"
(wheel,) = pathlib.Path(folder).glob("pip-*.whl")
zipfile.ZipFile(wheel).extractall(sysconfig.get_path("purelib"))
"""

def _run(ctx, arguments, timeout = 600, python_path = ""):
    return ctx.execute(
        arguments,
        timeout = timeout,
        environment = dict(_ENVIRONMENT, PYTHONPATH = python_path),
    )

def _find_python(ctx):
    """Returns the base interpreter's path; fails where none will do."""
    wanted = ctx.os.environ.get("PAXON_PYTHON", "")
    python = wanted if wanted.startswith("/") else ctx.which(wanted or "python3")
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
        fail(("`%s` is %s %s, and Paxon needs CPython %s: install one, and " +
              "name it in PAXON_PYTHON=/path/to/python3.11.") %
             (python, implementation, version, ", ".join(_VERSIONS)))
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
    ctx.file("BUILD.bazel", _INTERPRETER_BUILD.format(base = base))

python_interpreter = repository_rule(
    implementation = _python_interpreter,
    doc = "An isolated Python, registered as the toolchain of every target.",
    environ = ["PAXON_PYTHON"],
)

def _python_wheels(ctx):
    interpreter = ctx.path(Label("@paxon_python//:BUILD.bazel")).dirname
    python = str(interpreter) + "/installer/bin/python3"
    vendored = _run(ctx, [python, "-c", "import pip._vendor as v; print(*v.__path__)"])
    arguments = [python, ctx.path(ctx.attr._install), "--lock", ctx.path(ctx.attr.lock)]
    if ctx.attr.base_lock:
        # Not @pypi itself: the two are made at the same time.
        arguments += ["--base-lock", ctx.path(ctx.attr.base_lock)]
    for name, other in ctx.attr.substitutes.items():
        arguments += ["--substitute", "%s=%s" % (name, other)]
    for name in ctx.attr.from_source:
        arguments += ["--from-source", name]
    if ctx.attr.from_source:
        arguments += ["--build-tools", ctx.path(ctx.attr._build_tools)]
    ctx.report_progress("pip installs " + ctx.attr.lock.name)
    result = _run(ctx, arguments, timeout = 7200, python_path = vendored.stdout.strip())
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

def _extra(name, **kwargs):
    python_wheels(
        name = "pypi_" + name,
        lock = Label("//third_party/python:requirements_%s_lock.txt" % name),
        base_lock = Label("//third_party/python:requirements_lock.txt"),
        **kwargs
    )

def paxon_repositories():
    """Declares all repositories and registers the Python toolchain."""
    bazel4_stand_ins()
    python_interpreter(name = "paxon_python")
    python_wheels(
        name = "pypi",
        lock = Label("//third_party/python:requirements_lock.txt"),
    )
    _extra("cuda")
    _extra("data")
    _extra(
        "lm_eval",
        # They have no wheels.
        from_source = ["rouge_score", "sqlitedict", "word2number"],
        # It downloads metrics, and nothing is downloaded here.
        substitutes = {"evaluate": ""},
    )
    _extra("oracle")
    _extra("plan_cuda")
    _extra(
        "plan_cudnn",
        # Half a gigabyte that only a run needs.
        substitutes = {"nvidia_cublas": ""},
    )
    _extra("privacy")
    _extra(
        "serve",
        # gguf downloads with one and shows progress with the other.
        substitutes = {"requests": "", "tqdm": ""},
    )
    _extra("site")
    _extra(
        "text",
        # They only download, and nothing is downloaded here.
        substitutes = {"huggingface_hub": "", "requests": ""},
    )
    _extra(
        "tf",
        # The first has no wheel at all, the second none for Python 3.13.
        from_source = ["promise", "editdistance"],
        substitutes = {"tensorflow": "tensorflow_cpu"},
    )
    _extra("tpu")
    native.register_toolchains("@paxon_python//:toolchain")
