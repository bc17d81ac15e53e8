"""Tests for weights of few bits: made of a run, evaluated and decoded from."""

import contextlib
import dataclasses
import functools
import io
import re

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.decoding import generate, model_steps, samplers
from paxon.quantization import number_formats, quantized_array, served_einsum
from paxon.quantization import recipe as recipe_lib
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.configuration import overrides, rewrites
from paxon.runner.evaluation import evaluate, weight_conversion
from paxon.runner.generation import decode
from paxon.runner.session import compiled_steps, restore, run_files, serving
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing


def _job(weights=None, **knobs):
  return fdl.build(testing.TinyLm(quantization=weights, **knobs).job())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  """A run that has made no step; a training would be one more program."""
  folder = epath.Path(tmp_path_factory.mktemp("run"))
  session = session_lib.open_session(_job())
  with checkpointer.Checkpointer(folder / "checkpoints") as checkpoints:
    checkpoints.save(
      0,
      session.initial_state(),
      specs=session.state_specs,
      data=session.job.train_input.get_state(),
    )
  return folder


@pytest.fixture(scope="module")
def said(run_dir):
  """What the conversion of the run printed."""
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    evaluate.run(_job("int8:convert"), run_dir)
  return printed.getvalue()


@pytest.mark.nightly
def test_a_conversion_prints_its_errors(said):
  errors = re.findall(
    r"most ([\d.]+)% of the largest weight: (params/\S+)", said
  )
  # Four of an attention and three of a feed-forward layer, stacked.
  assert len(errors) == 7
  assert all(0 < float(error) <= 50.5 / 127 for error, _ in errors)
  old, new = _losses(said)
  assert old != new
  assert new == pytest.approx(old, rel=1e-3)


def _losses(said):
  found = re.search(r"loss ([\d.]+) as trained, ([\d.]+) served", said)
  return float(found[1]), float(found[2])


def test_evaluates_and_decodes_without_the_parameters(run_dir, said, capsys):
  session = session_lib.open_session(_job("int8:serve"))
  state = _restored(session, run_dir)
  stored = state.variables["served"]["stack"]["layers"]["blocks_0"]
  gate = stored["feed_forward"]["einsum"]["gate"]
  assert gate["values"].dtype == np.int8
  assert gate["values"].nbytes == 2 * 16 * 32
  assert "gate" not in str(jax.tree.structure(state.variables["params"]))

  evaluate.run(session.job, run_dir)
  again = re.search(r"loss ([\d.]+)", capsys.readouterr().out)
  assert float(again[1]) == pytest.approx(_losses(said)[1], rel=1e-3)
  # The figures of the parameters stay as they were.
  assert not (run_dir / "eval").exists()
  decode.run(session.job, run_dir, "def ")
  assert capsys.readouterr().out.startswith("def ")


def _restored(session, run_dir):
  """Weights of few bits of the run, placed as the session has them."""
  folder = serving.checkpoints(session.job, run_dir)
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    return restore.restore_for_evaluation(session, checkpoints, folder)


def _generated(session, state):
  """What is generated, its log probabilities, and the shape of a shard."""
  model = session.job.task.model

  def run(state, ids):
    values = session.evaluation_variables(state)
    made = generate.generate(
      model_steps.make_prefill(model, values),
      model_steps.make_decode_step(model, values),
      ids,
      jnp.full(ids.shape[:1], ids.shape[1]),
      sampler=samplers.Greedy(),
      key=jax.random.key(0),
      max_new_tokens=4,
    )
    return made.ids, made.log_probs

  ids = np.random.default_rng(0).integers(3, 250, (8, 6)).astype(np.int32)
  call = session.layout.jit(run, out_shardings=session.layout.replicated)
  stored = state.variables["served"]["stack"]["layers"]["blocks_0"]
  kernel = stored["feed_forward"]["einsum"]["down"]["values"]
  shard = kernel.addressable_shards[0].data.shape
  return *map(np.asarray, call(state, ids)), shard


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("name", "mesh", "shard"),
  [
    ("int8", "data=2,fsdp=2,tensor=2", (2, 16, 8)),
    # Two values a byte, of which each device has whole ones.
    ("int4", "fsdp=4,tensor=2", (2, 16, 2)),
    ("int4_awq", "data=2,fsdp=2,tensor=2", (2, 16, 4)),
  ],
)
def test_a_mesh_serves_what_one_device_does(run_dir, said, name, mesh, shard):
  del said
  if name == "int8":
    weights = _restored(session_lib.open_session(_job("int8:serve")), run_dir)
  else:
    weights = weight_conversion.convert(
      _job(f"{name}:convert"), run_dir
    ).converted
  weights = jax.device_get(weights)
  made = []
  for text, devices in ((mesh, None), ("data=1", jax.devices()[:1])):
    job = dataclasses.replace(_job(f"{name}:serve"), mesh=text)
    session = session_lib.open_session(job, devices=devices)
    shardings = session_lib.strip_for_evaluation(session.state_shardings)
    made.append(_generated(session, jax.device_put(weights, shardings)))
  (ids, log_probs, found), (one_ids, one_log_probs, _) = made
  assert found == shard
  np.testing.assert_array_equal(ids, one_ids)
  np.testing.assert_allclose(log_probs, one_log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", ["int4", "int8", None])
def test_quantized_training_keeps_its_ranges(trained, tmp_path):
  """A searched range would round weights otherwise than training did."""
  given = []
  if trained is not None:
    given = [overrides.Override("quantization", trained)]
  run_files.store_settings(
    testing.TinyLm.import_path(), given, epath.Path(tmp_path)
  )
  config = testing.TinyLm(quantization="int4:convert").job()
  notes = weight_conversion.keep_trained_ranges(
    config, "int4:convert", epath.Path(tmp_path)
  )
  recipe = fdl.build(config).task.model.stack.blocks[0].feed_forward.einsum
  assert recipe.recipe.search_range == (trained != "int4")
  expected = "the run was trained with int4; its ranges are kept"
  assert notes == ((expected,) if trained == "int4" else ())


@pytest.mark.nightly
def test_weights_are_calibrated_on_batches(run_dir, capsys):
  evaluate.run(_job("int4_gptq:convert"), run_dir)
  printed = capsys.readouterr().out
  assert "calibrated on the first 8 batches of the training input" in printed
  old, new = _losses(printed)
  assert old != new
  assert new == pytest.approx(old, rel=1e-2)
  evaluate.run(_job("int4_gptq:serve"), run_dir)
  again = re.search(r"loss ([\d.]+)", capsys.readouterr().out)
  assert float(again[1]) == pytest.approx(new, rel=1e-3)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "knobs",
  [{}, {"lora_kind": "dora", "frozen_storage": "int8"}],
  ids=["lora", "stored_dora"],
)
def test_adapters_are_merged_before_a_conversion(knobs, tmp_path, capsys):
  knobs = {"num_layers": 1, "lora_rank": 2, "lora_alpha": 3.0, **knobs}
  run_dir = epath.Path(tmp_path)
  config = testing.TinyLm(**knobs).job()
  session = session_lib.open_session(fdl.build(config))
  state = session.initial_state()
  random = np.random.default_rng(0)
  names = jax.tree.map(lambda spec: spec.name, session.specs)
  state = dataclasses.replace(
    state,
    variables=jax.tree.map(
      lambda name, v: (
        jnp.asarray(random.normal(0, 0.1, v.shape), v.dtype)
        if "/lora_" in name
        else v
      ),
      names,
      state.variables,
    ),
  )
  with checkpointer.Checkpointer(run_dir / "checkpoints") as checkpoints:
    checkpoints.save(
      0,
      state,
      specs=session.state_specs,
      data=session.job.train_input.get_state(),
    )
  trained = weight_conversion.Trained(
    job=fdl.build(config), adapter=rewrites.find_adapter(config)
  )
  evaluate.run(_job("int8:convert", **knobs), run_dir, trained=trained)
  printed = capsys.readouterr().out
  assert "merged the adapters of rank 2 into the kernels" in printed
  old, new = _losses(printed)
  assert new == pytest.approx(old, rel=1e-2)
  # The merged kernel by definition, rounded by definition.
  whole = session.evaluation_variables(state)["params"]["stack"]["layers"]
  layer = whole["blocks_0"]["feed_forward"]
  name = "params/stack/layers/blocks_0/feed_forward/up"
  kernel = layer["up"]
  if "frozen_storage" in knobs:
    stored = state.variables["stored"]["stack"]["layers"]["blocks_0"]
    fields = stored["feed_forward"]["einsum"]["up"]
    assert name in session.absent
    kernel = np.asarray(fields["values"], "f8") * np.asarray(fields["scale"])
  a, b = (
    np.asarray(layer["einsum"]["up"][n], "f8") for n in ("lora_a", "lora_b")
  )
  kernel = np.asarray(kernel, "f8")
  merged = kernel + 1.5 * a @ b
  if "frozen_storage" in knobs:
    m = np.linalg.norm(kernel, axis=1)
    m += np.asarray(layer["einsum"]["up"]["lora_magnitude"], "f8")
    merged *= (m / np.linalg.norm(merged, axis=1))[:, None]
  served = session_lib.open_session(_job("int8:serve", **knobs))
  found = _restored(served, run_dir).variables["served"]["stack"]["layers"]
  found = found["blocks_0"]["feed_forward"]["einsum"]["up"]
  scale = np.abs(merged).max(axis=1, keepdims=True) / 127
  np.testing.assert_allclose(found["scale"], scale, rtol=1e-5)
  off = np.asarray(found["values"], "f8") * scale - merged
  assert np.all(np.abs(off) <= 0.5001 * scale)


def test_no_program_holds_a_float_copy():
  """Not even one of NaN."""
  session = session_lib.open_session(_job("int8:serve"))
  batch = {
    k: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
    for k, x in session.batch.items()
  }
  text = compiled_steps.compile_eval_step(session, batch).as_text()
  assert "s8[2,16,32]" in text
  assert "f32[2,16,32]" not in text


def _errors_of(x, stored):
  axis = served_einsum.packed_axis(stored.format, x.shape)
  stored = stored if axis is None else stored.pack(axis)
  found = weight_conversion._errors(
    jnp.asarray(x),
    {"values": stored.values, "scale": stored.scale},
    number_format=stored.format,
    layer_shape=x.shape,
  )
  return weight_conversion.WeightErrors(
    **{k: float(v) for k, v in found.items()}
  )


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3"])
def test_the_error_of_a_weight_is_a_share_of_the_largest(name):
  recipe = recipe_lib.TensorRecipe(number_formats.FORMATS[name])
  x = np.random.default_rng(0).standard_normal((3, 4)).astype("f4")
  stored = quantized_array.quantize(jnp.asarray(x), recipe)
  off = np.asarray(stored.dequantize(), "f8") - x
  error = _errors_of(x, stored)
  expected = np.abs(off).max() / np.abs(x).max()
  assert error.largest == pytest.approx(expected, rel=1e-5)
  assert error.mean == pytest.approx(
    np.sqrt((off**2).mean() / (x.astype("f8") ** 2).mean()), rel=1e-5
  )
  # The largest value of fp8 may be rounded down, which then is the range.
  assert error.rounding <= error.largest * 1.00001
  assert 0 < error.rounding < weight_conversion._MAX_ROUNDING


def test_what_a_searched_range_cuts_off_is_no_mistake():
  recipe = recipe_lib.TensorRecipe(number_formats.INT4)
  x = np.random.default_rng(0).standard_normal((50, 3)).astype("f4")
  x[0, 0] = 6.0
  error = _errors_of(x, served_einsum.search_scale(jnp.asarray(x), recipe))
  whole = _errors_of(x, quantized_array.quantize(jnp.asarray(x), recipe))
  assert error.largest > weight_conversion._MAX_ROUNDING > 2 * error.rounding
  assert error.mean < whole.mean


def test_a_parameter_of_zeros_can_be_stored():
  """As are projections that a residual block begins with."""
  recipe = recipe_lib.TensorRecipe(number_formats.INT8)
  x = np.zeros((3, 4), "f4")
  error = _errors_of(x, quantized_array.quantize(jnp.asarray(x), recipe))
  assert error == weight_conversion.WeightErrors(
    largest=0.0, mean=0.0, rounding=0.0
  )


def test_each_mistake_is_named(run_dir, said, tmp_path):
  del said
  empty = epath.Path(tmp_path)
  refused = functools.partial(pytest.raises, user_error.UserError)
  with refused(match=r"of step 0 is already converted, in .*int8:serve"):
    evaluate.run(_job("int8:convert"), run_dir)
  with refused(match=r"no checkpoint in"):
    evaluate.run(_job("int4:convert"), empty)
  with refused(match=r"has float checkpoints but no int4 weights; make them"):
    decode.run(_job("int4:serve"), run_dir, "x")
  with refused(match=r"has neither checkpoints nor int4 weights; train first"):
    decode.run(_job("int4:serve"), empty, "x")
  with refused(match=r"--continuous evaluates each new"):
    evaluate.run(_job("int8:serve"), run_dir, continuous=True)


@pytest.mark.parametrize(
  ("weights", "mode", "message"),
  [
    (
      "int8:serve",
      "train",
      r"requires --mode=eval or decode or infer or serve or plan"
      r" \(got --mode=train\)",
    ),
    ("int8:convert", "plan", r"train with 'int8' or without"),
    ("int8:convert", "decode", r"requires --mode=eval \(got --mode=decode\)"),
  ],
)
def test_rejects_a_mode_that_cannot_use_the_weights(weights, mode, message):
  with pytest.raises(user_error.UserError, match=message):
    serving.check_mode(_job(weights), mode)
  serving.check_mode(_job(weights), "eval")
  serving.check_mode(_job(), mode)


def test_rejects_a_weight_that_is_not_the_parameter():
  def check(method=None, **rounding):
    weight_conversion._check_errors(
      {
        f"params/{name}": weight_conversion.WeightErrors(
          largest=error, mean=error, rounding=error
        )
        for name, error in rounding.items()
      },
      method,
    )

  with pytest.raises(
    user_error.UserError, match=r"params/b cannot be quantized"
  ):
    check(a=0.004, b=0.7)
  with pytest.raises(
    user_error.UserError, match=r"params/c cannot be quantized"
  ):
    check(c=float("nan"))
  # GPTQ moves weights on purpose.
  check(recipe_lib.Gptq(), a=0.3)
  with pytest.raises(user_error.UserError, match=r"its mean error 0\.7"):
    check(recipe_lib.Gptq(), b=0.7)
  check(recipe_lib.Wanda(), b=0.7)
  with pytest.raises(user_error.UserError, match=r"there are no weights to"):
    check()


def test_rejects_a_job_without_a_serving_mode():
  with pytest.raises(ValueError, match=r"must end with ':serve' or ':convert'"):
    dataclasses.replace(_job(), weights="int8")


def test_what_reads_an_absent_parameter_is_nan():
  session = session_lib.open_session(_job("int8:serve"))
  name = "params/stack/layers/blocks_0/feed_forward/gate"
  assert name in session.absent
  values = serving.complete({"params": {"a": 1}}, session.absent)
  blocks = values["params"]["stack"]["layers"]["blocks_0"]
  assert np.isnan(blocks["feed_forward"]["gate"]).all()
  assert values["params"]["a"] == 1
  assert served_einsum.COLLECTION in session.specs
