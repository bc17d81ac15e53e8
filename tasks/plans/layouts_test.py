"""Tests of analytical estimates, on layouts whose order is known."""

import math

import jax
import pytest

from paxon.learners import train_state
from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import layouts, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import job_lint, search_space, subject
from paxon.sharding import axes

_GIB = 2**30
_70B = (
  "tasks.lm.params.gpu.LLaMA70B",
  "--fdl.length=8192",
  "--fdl.global_batch_size=128",
)
_7B = (
  "tasks.lm.params.llama.Llama2_7B",
  "--fdl.length=8192",
  "--fdl.global_batch_size=32",
)


def _make(experiment, *assignments, target, work=None):
  given = [overrides.parse_argument(text) for text in assignments]
  job = resolving.build(resolving.resolve(experiment, given).config)
  shapes = job_lint.get_shapes(job)
  state = train_state.state_specs(shapes.specs, learner=job.task.learner)
  return layouts.Layouts(
    specs=jax.tree.leaves(shapes.specs),
    state=jax.tree.leaves(state),
    batch={name: shape for name, (shape, _) in shapes.batch.items()},
    rules=job.rules,
    target=targets.parse(target),
    work=work,
  )


def _space(target, *assignments):
  given = [overrides.parse_argument(text) for text in assignments]
  return search_space.Space(
    subject.resolve(_7B[0], given, targets.parse(target))
  )


def _ranked(estimates, meshes):
  predicted = {
    mesh: estimates.predict(layouts.Layout(mesh=mesh)) for mesh in meshes
  }
  return layouts.rank(
    meshes,
    step=lambda mesh: predicted[mesh].step,
    memory=lambda mesh: predicted[mesh].peak,
  )


def test_microbatches_need_an_accumulator_beside_their_gradient():
  # Few tokens: activations are small.
  given = (_7B[0], "--fdl.length=128", "--fdl.global_batch_size=32")
  estimates = _make(*given, target="h200:1x8")
  found = estimates.predict(layouts.Layout(mesh="fsdp=8", microbatches=4))
  size = sum(math.prod(kernel.shape) for kernel in estimates.kernels)
  # Both are float32, and split over the devices.
  assert found.peak - found.state >= 2 * 4 * size / 8


@pytest.fixture(scope="module", name="on_64")
def _70b_on_64():
  return _make(*_70B, target="h200:8x8")


@pytest.fixture(scope="module", name="on_8")
def _7b_on_8():
  return _make(*_7B, target="h200:1x8")


@pytest.mark.parametrize(
  "slower",
  [
    # 13.1 s and 46.3 GiB, against 15.0 s and 66.5 GiB, as compiled.
    "data=2,fsdp=8,tensor=4",
    "fsdp=8,tensor=8",
    "fsdp=16,tensor=4",
    "fsdp=32,tensor=2",
    "data=8,tensor=8",
  ],
)
def test_fsdp_over_all_hosts_beats_tensor_parallelism(on_64, slower):
  assert _ranked(on_64, [slower, "fsdp=64"])[0] == "fsdp=64"


@pytest.mark.parametrize(
  "larger", ["data=2,fsdp=4", "data=4,fsdp=2", "data=8", "fsdp=4,tensor=2"]
)
def test_of_equally_fast_meshes_the_one_with_less_memory_is_first(on_8, larger):
  assert _ranked(on_8, [larger, "fsdp=8"])[0] == "fsdp=8"


def test_recomputation_and_microbatches_trade_time_for_memory(on_8):
  def predict(**fields):
    return on_8.predict(layouts.Layout(mesh="fsdp=8", **fields))

  # Splash attention alone has residuals.
  others = set(layouts.Remat) - {layouts.Remat.RESIDUALS}
  levels = [predict(remat=level) for level in layouts.Remat if level in others]
  assert [p.step for p in levels] == sorted(p.step for p in levels)
  assert [p.peak for p in levels] == sorted(
    (p.peak for p in levels), reverse=True
  )
  assert predict(microbatches=2).peak < predict().peak
  plain = predict(attention=layouts.Attention.PLAIN)
  causal = predict(attention=layouts.Attention.CAUSAL)
  assert causal.step < predict().step < plain.step


def test_each_microbatch_gathers_and_scatters_all_kernels():
  # Nothing is computed, so nothing is hidden.
  work = layouts.Work(model=0.0, attention=0.0)
  found = _make(*_7B, target="h200:1x8", work=work)
  # Kernels in bfloat16 without the 65 norms: gathered twice, gradients
  # scattered once, 7/8 of each by one device at 450 GB/s.
  one = 3 * 2 * (6_738_415_616 - 65 * 4096) * 7 / 8 / 450e9
  for microbatches in (1, 8):
    layout = layouts.Layout(mesh="fsdp=8", microbatches=microbatches)
    expected = pytest.approx(microbatches * one, rel=1e-6)
    assert found.predict(layout).step == expected


def test_the_state_is_exact(on_8):
  # Llama 2 7B: 6,738,415,616 parameters, and two moments, in float32.
  state = 3 * 4 * 6_738_415_616
  batch = on_8.state_bytes("fsdp=8") - state // 8
  assert 0 < batch < 0.01 * _GIB
  assert on_8.whole_state_bytes() == pytest.approx(state, rel=1e-6)


def test_flops_follow_from_shapes(on_8):
  # 6 FLOPs a weight and token without the embedding's look-up, and
  # 12 T N H a token and layer.
  tokens = 32 * 8192
  attention = 12 * 32 * 8192 * 4096 * tokens
  assert on_8.work.attention == pytest.approx(attention)
  weights = 6_738_415_616
  assert on_8.work.model - attention == pytest.approx(
    6 * weights * tokens, rel=0.001
  )


def test_axes_that_the_model_uses(on_8):
  assert on_8.usable_axes == (axes.DATA, axes.FSDP, axes.SEQUENCE, axes.TENSOR)
  assert on_8.is_possible("fsdp=4,tensor=2", microbatches=4)
  # 32 sequences.
  assert not on_8.is_possible("fsdp=8", microbatches=8)
  # No stages.
  assert not on_8.is_possible("stage=2,fsdp=4", microbatches=1)
  split_nothing = _make(*_7B, "--fdl.rules=fsdp", target="h200:1x8")
  assert not split_nothing.is_possible("fsdp=4,tensor=2", microbatches=1)


@pytest.mark.parametrize(
  ("target", "kernel"),
  [
    ("h200:1x8", "layers.attention.cudnn_attention.cudnn"),
    ("v5e:2x4", "layers.attention.splash.Splash()"),
  ],
)
def test_the_fused_kernel_of_the_platform(target, kernel, monkeypatch):
  monkeypatch.setattr(topology, "missing_for_cudnn", tuple)
  plain = "--fdl.attention_kernel=layers.attention.kernels.plain"
  space = _space(target, plain, "--fdl.mesh=fsdp=8")
  kernels = {
    o.text
    for c in space.candidates()
    for o in c.overrides
    if o.path.endswith(".kernel")
  }
  assert kernels == {kernel}
  # An unsupported kernel of the job is always replaced.
  other = {"h200:1x8": "splash.Splash()", "v5e:2x4": "cudnn_attention.cudnn"}
  given = f"--fdl.attention_kernel=layers.attention.{other[target]}"
  space = _space(target, given, "--fdl.mesh=fsdp=8")
  assert all(
    any(o.path.endswith(".kernel") for o in c.overrides)
    for c in space.candidates()
  )
