"""Tests for planning on this machine's devices, in one process."""

import hashlib

import fiddle as fdl
import jax
import pytest

from paxon.layers import remat, unembedding
from paxon.runner import user_error
from paxon.runner.plan import compiled_program, flops, result
from paxon.runner.plan import target as targets
from paxon.runner.planning import measure
from paxon.runner.session import compiled_steps, memory_fit, session
from paxon.runner.training import pipelined_testing, testing

_CPU8 = targets.parse("cpu:8")


def _plan(job, **options):
  return measure.measure(job, _CPU8, experiment="a.B", **options)


def _job(policy=None, **knobs):
  _, config = testing.make(**knobs)
  config.task.model.stack.remat_policy = policy
  return fdl.build(config)


@pytest.fixture(scope="module", name="plan")
def _plan_of_tiny():
  return _plan(_job(mesh="fsdp=4,tensor=2"))


def test_memory_by_arithmetic_is_what_the_compiler_says(plan):
  memory = plan.memory
  assert memory.arguments == memory.state_and_batch
  # Adam keeps two moments of every parameter, and some counters.
  assert 2 * memory.parameters <= memory.optimizer
  assert memory.optimizer < 2 * memory.parameters + 64
  assert memory.gradients == memory.parameters
  assert memory.temporaries > 0
  assert memory.peak >= memory.arguments + memory.temporaries
  assert memory.fit is result.Fit.UNKNOWN


def test_the_plan_is_of_the_program_that_runs(plan):
  job = _job(mesh="fsdp=4,tensor=2")
  opened = session.open_session(job)
  compiled = compiled_steps.compile_train_step(opened)
  text = compiled_program.without_sources(compiled.as_text())
  assert plan.fingerprint == hashlib.sha256(text.encode()).hexdigest()
  sizes = compiled.memory_analysis()
  assert plan.memory.temporaries == sizes.temp_size_in_bytes
  traced = compiled_steps.trace_train_step(opened)
  assert plan.flops.model == flops.count(traced.jaxpr).model_flops


@pytest.mark.nightly
def test_the_options_of_a_run_are_those_of_its_plan(plan):
  knobs = {
    "mesh": "fsdp=4,tensor=2",
    "compiler_options": {"xla_disable_hlo_passes": "fusion", "xla_gpu_x": 1},
  }
  planned = _plan(_job(**knobs))
  opened = session.open_session(_job(**knobs))
  assert opened.compiler_options == {"xla_disable_hlo_passes": "fusion"}
  assert planned.compiler_options == opened.compiler_options
  # They reach the compiler, of both.
  assert planned.fingerprint != plan.fingerprint
  text = compiled_program.without_sources(
    compiled_steps.compile_train_step(opened).as_text()
  )
  assert planned.fingerprint == hashlib.sha256(text.encode()).hexdigest()
  assert plan.compiler_options == {}


def test_the_options_of_an_absent_gpu_are_planned_with_ours():
  job = _job(mesh="data=8", compiler_options={"xla_gpu_x": 1, "xla_tpu_x": 1})
  planned = measure.measure(
    job, targets.parse("h200:1x8"), experiment="a.B", is_compiled=False
  )
  assert planned.compiler_options == {
    "xla_gpu_enable_latency_hiding_scheduler": "True",
    "xla_gpu_x": "1",
  }
  # Each device has all parameters, in float32.
  assert planned.memory.parameters == 4 * planned.num_parameters


def test_an_option_that_the_compiler_does_not_know_is_refused():
  job = _job(mesh="data=8", compiler_options={"xla_no_such_option": True})
  with pytest.raises(
    user_error.UserError, match=r"for cpu has no option 'xla_no_such_option'"
  ):
    _plan(job)


def test_says_what_was_planned(plan):
  assert (plan.num_devices, plan.num_chips) == (8, 8)
  assert plan.mesh == {"fsdp": 4, "tensor": 2}
  assert plan.batch["inputs"] == (8, 16)
  assert plan.versions["jax"] == jax.__version__
  assert plan.compiled
  # No vendor states the rates of this machine.
  assert plan.bound is None
  assert plan.estimate is None
  assert any("the rates of cpu are not known" in note for note in plan.notes)
  assert {c.link for c in plan.collectives} == {"fast"}
  kinds = {(c.kind, c.axes) for c in plan.collectives}
  assert ("all-gather", ("fsdp",)) in kinds
  assert ("all-reduce", ("tensor",)) in kinds


def test_the_compiled_text_does_what_was_traced(plan):
  assert plan.compiled_flops == pytest.approx(plan.flops.hardware, rel=0.01)
  assert plan.hbm_bytes > plan.memory.arguments
  assert plan.warnings == ()
  assert [note for note in plan.notes if "not known" in note] == [
    "The time of a step is not predicted: the rates of cpu are not known."
  ]


def test_without_a_compiler_there_is_the_closed_form(plan):
  traced = _plan(_job(mesh="fsdp=4,tensor=2"), is_compiled=False)
  assert not traced.compiled
  assert traced.flops == plan.flops
  assert traced.memory.state_and_batch == plan.memory.state_and_batch
  assert traced.memory.peak is None
  assert (traced.collectives, traced.fingerprint) == ((), None)


def test_a_larger_batch_takes_more_temporaries(plan):
  double = _plan(_job(mesh="fsdp=4,tensor=2", global_batch_size=16))
  assert double.memory.temporaries > 1.2 * plan.memory.temporaries
  assert double.memory.batch == 2 * plan.memory.batch
  assert double.memory.parameters == plan.memory.parameters


def test_recomputation_takes_less_and_is_reported():
  knobs = {"mesh": "fsdp=8", "num_layers": 12, "global_batch_size": 64}
  saved = _plan(_job(**knobs))
  recomputed = _plan(_job(remat.save_nothing, **knobs))
  assert recomputed.memory.temporaries < 0.8 * saved.memory.temporaries
  assert recomputed.flops.model == saved.flops.model
  assert saved.flops.recomputed == 0 < recomputed.flops.recomputed


def test_the_flops_of_a_pipeline_have_its_bubble():
  lm = pipelined_testing.PipelinedLm(
    num_stages=2, mesh="data=4,stage=2", global_batch_size=16
  )
  job = fdl.build(lm.job())
  plan = _plan(job, is_compiled=False)
  found = plan.flops
  assert found.hardware == found.model + found.recomputed + found.bubble
  # Four microbatches in five ticks; the head, once, is outside of the stages.
  B, T = plan.batch["inputs"]
  head = 6 * B * T * 16 * job.task.model.embedding.vocab_size
  assert found.bubble == pytest.approx((found.hardware - head) / 5)


def test_a_mesh_that_does_not_fit_the_target():
  with pytest.raises(user_error.UserError, match=r"needs exactly 4 devices"):
    _plan(_job(mesh="fsdp=4"))


def test_other_programs_take_what_their_compiled_steps_take():
  job = _job(mesh="fsdp=4,tensor=2")
  opened = session.open_session(job)
  found = {
    each.name: each
    for each in _plan(job, with_other_programs=True).other_programs
  }
  (source,) = job.eval_inputs.values()
  batch = session.abstract_batch(source, opened.layout)
  sizes = compiled_steps.compile_eval_step(opened, batch).memory_analysis()
  evaluation = found["evaluation"]
  assert evaluation.temporaries == sizes.temp_size_in_bytes
  # The whole state stays, with the batch beside it.
  state = memory_fit.shard_bytes(opened.abstract_state())
  rest = sizes.temp_size_in_bytes + memory_fit.shard_bytes(batch)
  assert evaluation.peak == pytest.approx(state + rest, rel=0.01)
  assert found["decoding"].peak > state
  # One host copies each shard of the state once, whatever is replicated.
  leaves = jax.tree.leaves(opened.abstract_state())
  assert found["saving"].host == sum(x.size * x.dtype.itemsize for x in leaves)
  assert set(found) == {"evaluation", "decoding", "saving"}
  assert not any(each.note for each in found.values())


def test_an_evaluation_that_fails_is_a_note(monkeypatch):
  def fail(*args):
    raise ValueError("no metric 'x'\nmore lines")

  monkeypatch.setattr(compiled_steps, "trace_eval_step", fail)
  plan = _plan(_job(mesh="fsdp=8"), with_other_programs=True)
  evaluation = plan.other_programs[0]
  assert evaluation.note == "not known: no metric 'x'"
  assert (evaluation.peak, plan.memory.peak is None) == (None, False)


def _tiny_sizes(batch, slots):
  """Returns the bytes of `TinyLm` and of its cache, from their shapes.

  A layer's cache has keys and values of two heads of 8, in float32; positions
  and segments are int32 in each layer.
  """
  width, heads, hidden, vocab, layers = 16, 16, 32, 264, 2
  layer = 4 * width * heads + 3 * width * hidden + 2 * width
  parameters = 4 * (vocab * width + layers * layer + width)
  cache = layers * (4 * batch * slots * (2 * heads + 2) + 4)
  return parameters, cache


def test_a_decoding_step_reads_the_variables_and_the_cache():
  plan = _plan(_job(mesh="data=8"), decode_steps=[(16, 24), (3, 8)])
  step, other = plan.decode_steps
  parameters, cache = _tiny_sizes(16, 24)
  assert step.parameters == parameters
  # The counter of each layer is on all devices.
  assert step.cache == (cache - 8) // 8 + 8
  # The head is the embedding, so all of it is read.
  assert step.read == pytest.approx(parameters + step.cache, abs=64)
  assert step.peak >= step.parameters + step.cache
  assert (other.batch, other.length, other.cache) == (3, 8, None)
  assert other.note.startswith("3 sequences do not divide by the 8 shards")


def test_a_decoding_step_is_split_like_the_model():
  plan = _plan(
    _job(mesh="tensor=2,data=4"), decode_steps=[(8, 24)], is_compiled=False
  )
  (step,) = plan.decode_steps
  _, cache = _tiny_sizes(2, 24)
  rest = 2 * (4 * 2 * 24 * 2 + 4)  # Not split by heads.
  assert step.cache == (cache - rest) // 2 + rest
  assert step.peak is None


@pytest.mark.parametrize(("target", "width"), [("h200:1x8", 2), ("cpu:8", 4)])
def test_a_traced_cache_in_bfloat16_has_the_bytes_of_the_target(target, width):
  # CPUs store bfloat16 in float32, except those that stand in for GPUs.
  job = _job(mesh="data=8", dtype="bfloat16")
  plan = measure.measure(
    job,
    targets.parse(target),
    experiment="a.B",
    decode_steps=[(8, 24)],
    is_compiled=False,
  )
  (step,) = plan.decode_steps
  # Keys and values of two heads of 8, and two int32, in each of two layers.
  assert step.cache == 2 * (24 * (2 * 16 * width + 2 * 4) + 4)


def test_rows_of_a_table_are_read_not_the_table():
  _, config = testing.make()
  config.task.model.head = fdl.Config(unembedding.Unembedding, vocab_size=264)
  plan = _plan(fdl.build(config), decode_steps=[(8, 24)], is_compiled=False)
  (step,) = plan.decode_steps
  table, rows = 4 * 264 * 16, 4 * 8 * 16 // 8
  expected = step.parameters + step.cache - table + rows
  assert step.read == pytest.approx(expected, abs=64)
