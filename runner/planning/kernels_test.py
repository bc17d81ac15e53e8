"""Tests for kernels in a plan and in a run: cuDNN's, and the expected ones.

What needs cuDNN's library runs under `--config=plan_cudnn` only.
"""

import re
import subprocess
import sys

from etils import epath
import fiddle as fdl
import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides
from paxon.runner.hosts import warm_python
from paxon.runner.plan import child_process, testing, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import child, kernel_experiments, measure
from paxon.runner.settings import compiler
from paxon.runner.training import train

_MODULE = kernel_experiments.__name__.removeprefix("paxon.")
_NO_SUCH_KERNEL = {"part": "attention forward", "kernel": "pallas"}
_KERNEL = r"task\.model\.stack\.blocks\[0\]\.attention\.kernel"


@pytest.fixture(scope="module", autouse=True)
def _warm_python(tmp_path_factory):
  folder = tmp_path_factory.mktemp("python")
  with warm_python.install([child.__name__], folder):
    yield


def _plan(experiment, target="h200:1x8", *, is_compiled=False, **knobs):
  """Plans in this process, where only CPUs can be compiled for."""
  config = experiment(**{"mesh": "data=8", **knobs}).job()
  return measure.measure(
    fdl.build(config),
    targets.parse(target),
    experiment="a.B",
    is_compiled=is_compiled,
  )


def _compiled(name, target="h200:1x8", mesh="fsdp=4,tensor=2", **knobs):
  """Plans in another process, with the compiler for the target."""
  given = [overrides.Override(k, str(v)) for k, v in knobs.items()]
  return child.plan(
    f"{_MODULE}.{name}",
    [*given, overrides.Override("mesh", mesh)],
    testing.target(target),
    is_compiled=True,
    time_limit=600.0,
  )


def _needs_cudnn():
  missing = topology.missing_for_cudnn()
  if missing:
    pytest.skip(f"needs {', '.join(missing)}: --config=plan_cudnn")


_CHECK = """
import sys
from paxon.runner.plan import compiler_options
from paxon.runner.plan import target, topology

device = topology.devices(target.parse(sys.argv[1]))[0]
compiler_options.check(eval(sys.argv[2]), device)
"""


@pytest.mark.parametrize(
  ("text", "options", "unknown"),
  [
    (
      "h200:1x1",
      {"xla_gpu_enable_triton_gemm": False},
      {"xla_gpu_enable_triton_gems": False},
    ),
    (
      "v4:2x2x1",
      compiler.get_options("async_collectives", "v4"),
      {"xla_tpu_overlap_compute_collective_tcp": True},
    ),
  ],
)
def test_compilers_for_absent_hardware_check_options(text, options, unknown):
  target = testing.target(text)

  def check(given):
    return subprocess.run(
      [sys.executable, "-c", _CHECK, text, repr(given)],
      env=child_process.environment(target, is_compiled=True),
      capture_output=True,
      text=True,
      check=False,
    )

  known, refused = check(options), check(unknown)
  assert known.returncode == 0, known.stderr
  assert refused.returncode
  assert f"has no option {next(iter(unknown))!r}" in refused.stderr


@pytest.mark.nightly
def test_a_wrong_kernel_is_an_error_of_the_plan_with_the_reason():
  message = (
    r"attention forward is expected to be cudnn, but the compiled step"
    r" has \d of plain \(matmuls, .*attention backward is expected .*: "
    + _KERNEL
    + r" is layers\.attention\.kernels\.plain, which never calls cuDNN; set it"
    r" to layers\.attention\.cudnn_attention\.one_document \(or \.cudnn, for"
    r" packed sequences\)\.$"
  )
  with pytest.raises(user_error.UserError, match=message):
    _compiled("ExpectsCudnnOfPlain")


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    (
      {"head_dim": 12},
      r"does not support this layer: its head_dim is 12, and ",
    ),
    (
      {"dtype": "float32"},
      r"does not support this layer: its dtype is float32",
    ),
  ],
)
def test_a_layer_that_cudnn_cannot_serve_is_named(knobs, message):
  with pytest.raises(user_error.UserError, match=f"^{_KERNEL}.*{message}"):
    _plan(kernel_experiments.ExpectsCudnn, **knobs)


@pytest.mark.parametrize(
  ("kernel", "target", "knobs", "message"),
  [
    ("splash", "h200:1x8", {}, r" on h200:1x8: .* runs on tpu, not on cuda"),
    ("splash", "v5e:2x4", {"mesh": "sequence=8"}, r": .*splits sequences into"),
    (
      "ring",
      "v5e:2x4",
      {"position_bias": True},
      r" on v5e:2x4: .*_bias is Alibi",
    ),
    ("cudnn", "h200:1x8", {"mesh": "sequence=8"}, r": .*splits sequences into"),
    (
      "splash",
      "v5e:2x4",
      {"generates": True},
      r" on v5e:2x4: .* generates samples",
    ),
  ],
)
def test_a_kernel_that_does_not_fit_is_refused_before_tracing(
  kernel, target, knobs, message
):
  with pytest.raises(user_error.UserError, match=_KERNEL + message):
    _plan(kernel_experiments.HasKernel, target, kernel=kernel, **knobs)


def test_cudnn_elsewhere_than_on_gpus_is_refused():
  message = _KERNEL + r" on cpu:8: .* it runs on cuda, not on cpu; use .*fused"
  with pytest.raises(user_error.UserError, match=message):
    _plan(kernel_experiments.ExpectsCudnn, "cpu:8", is_compiled=True)


def test_a_plan_without_cudnn_names_what_is_missing():
  missing = topology.missing_for_cudnn()
  if not missing:
    pytest.skip("cuDNN is here")
  plan = _plan(kernel_experiments.ExpectsCudnn)
  assert not plan.compiled
  assert plan.memory.parameters
  notes = [note for note in plan.notes if "cuDNN's" in note]
  assert len(notes) == 1
  assert f"the compiler needs {', '.join(missing)}" in notes[0]
  assert "--config=plan_cudnn" in notes[0]


@pytest.mark.nightly
def test_ring_attention_is_compiled_for_rows_over_devices():
  plan = _compiled("ExpectsRing", mesh="sequence=4,tensor=2")
  assert plan.compiled
  found = {(c.part, c.kernel) for c in plan.kernel_choices}
  assert ("attention forward", "ring") in found
  assert ("attention backward", "ring") in found
  along = [c for c in plan.collectives if "sequence" in c.axes]
  assert "collective-permute" in {c.kind for c in along}


def test_splash_attention_is_compiled_for_each_layer():
  plan = _compiled("ExpectsSplash", "v5e:2x4", num_layers=3)
  assert plan.compiled
  found = {(c.part, c.kernel, c.count) for c in plan.kernel_choices}
  assert ("attention forward", "splash", 3) in found
  # One for queries, and one for keys and values.
  assert ("attention backward", "splash", 6) in found


def test_cudnn_attention_is_compiled_for_each_layer():
  _needs_cudnn()
  plan = _compiled("ExpectsCudnn", num_layers=3)
  assert plan.compiled
  # Nothing is recomputed.
  assert plan.kernels["__cudnn$fmhaSoftmax"] == 3
  assert plan.kernels["__cudnn$fmhaSoftmaxBackward"] == 3
  found = {(c.part, c.kernel, c.count) for c in plan.kernel_choices}
  assert ("attention forward", "cudnn", 3) in found
  assert ("attention backward", "cudnn", 3) in found


def test_saved_residuals_of_cudnn_spare_its_forward_kernel():
  _needs_cudnn()
  plan = _compiled("ExpectsCudnn", num_layers=3, saves_residuals=True)
  # Twice as many if rematerialization ran it again.
  assert plan.kernels["__cudnn$fmhaSoftmax"] == 3
  assert plan.kernels["__cudnn$fmhaSoftmaxBackward"] == 3


def test_packed_rows_give_cudnn_a_bias():
  _needs_cudnn()
  plan = _compiled("ExpectsCudnn", packed=True)
  assert plan.kernels["__cudnn$fmhaScaleBiasSoftmax"] == 2


@pytest.mark.parametrize(
  ("packed", "largest"),
  # No logits; and a bias of all heads together.
  [(False, set()), (True, {1})],
)
def test_nothing_has_a_logit_for_each_head(tmp_path, packed, largest):
  _needs_cudnn()
  target = testing.target("h200:1x1")
  output = tmp_path / "program.txt"
  subprocess.run(
    [
      *(sys.executable, "-m", kernel_experiments.__name__),
      *(target.text, str(int(packed)), str(output)),
    ],
    env=child_process.environment(target, is_compiled=True),
    capture_output=True,
    check=True,
  )
  length = kernel_experiments.LENGTH
  shapes = re.findall(
    rf"bf16\[(?:\d+,)?(\d+),{length},{length}\]", output.read_text()
  )
  assert {int(heads) for heads in shapes} == largest


def test_an_expected_kernel_is_found_and_an_unexpected_one_refused():
  plan = _plan(kernel_experiments.Expects, "cpu:8", is_compiled=True)
  (choice,) = plan.kernel_choices
  assert (choice.part, choice.kernel) == ("matmuls", "xla")
  assert choice.is_final
  with pytest.raises(
    user_error.UserError,
    match=r"Job\.expected_kernels: attention forward is expected to be pallas,"
    r" but the compiled step has none\.$",
  ):
    _plan(
      kernel_experiments.Expects, "cpu:8", is_compiled=True, **_NO_SUCH_KERNEL
    )


def test_a_run_is_refused_before_its_first_step(tmp_path):
  config = kernel_experiments.Expects(**_NO_SUCH_KERNEL).job()
  folder = epath.Path(tmp_path)
  with pytest.raises(
    user_error.UserError, match=r"expected to be pallas, but the compiled step"
  ):
    train.run(fdl.build(config), config, folder)
  assert not list(folder.glob("checkpoints/*"))


def test_a_run_refuses_cudnn_without_a_gpu(tmp_path):
  config = kernel_experiments.ExpectsCudnn().job()
  with pytest.raises(
    user_error.UserError, match=_KERNEL + r" on this machine's devices: "
  ):
    train.run(fdl.build(config), config, epath.Path(tmp_path))
