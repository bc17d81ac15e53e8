"""Tests of the state of Adafactor, and of states that do not fit."""

from etils import epath
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import learner as learner_lib
from paxon.learners.optimizers import adafactor, adamw, optax_optimizer, sgd
from paxon.runner import user_error
from paxon.runner.checkpoints import lazy_array
from paxon.sharding import variables
from paxon.tools.pax_checkpoints import (
  name_map,
  optimizer_slots,
  pax_files,
  testing,
  variable_plan,
)

D, V, N, H = 6, 9, 2, 4
OUT = "params/stack/layers/blocks_0/attention/out"
TABLE = "params/embedding/table"
BIAS = "params/embedding/bias"
SHAPES = {TABLE: (V, D), BIAS: (V,), OUT: (3, N, H, D)}
NAMES = {
  TABLE: "lm.softmax.logits_ffn.linear.w",
  BIAS: "lm.softmax.logits_ffn.bias.b",
  OUT: "lm.transformer.repeat.sub.x_layers_0.self_attention.post.w",
}


def _spec(name: str, shape, variable: str) -> variables.VariableSpec:
  stacked = (("layers", 1),) if "blocks_" in variable else ()
  axes = (None,) * len(shape)
  return variables.VariableSpec(
    name, tuple(shape), jnp.dtype("float32"), axes, stacked=stacked
  )


def _state_specs(slots) -> list[variables.VariableSpec]:
  count = variables.VariableSpec(
    "opt_state/0/count", (), jnp.dtype("int32"), ()
  )
  return [
    count,
    *(
      _spec(f"opt_state/{slot}/{name}", shape, name)
      for slot, shapes in slots.items()
      for name, shape in shapes.items()
    ),
  ]


def _import(folder, opt_states, specs, optimizer):
  rng = np.random.default_rng(0)
  values = {
    NAMES[TABLE]: rng.normal(size=(D, V)).astype("f4"),
    NAMES[BIAS]: rng.normal(size=V).astype("f4"),
    NAMES[OUT]: rng.normal(size=(3, D, N, H)).astype("f4"),
  }
  state = testing.make_state(values, opt_states=opt_states)
  testing.write(folder, state, kind="OCDBT")
  arrays = pax_files.open_checkpoint(epath.Path(folder)).arrays
  model = {
    name.removeprefix("mdl_vars."): array
    for name, array in arrays.items()
    if name.startswith("mdl_vars.")
  }
  plan = variable_plan.make(
    [_spec(name, shape, name) for name, shape in SHAPES.items()],
    model,
    name_map.read(None),
    direct_scale=None,
  )
  return optimizer_slots.plan(
    specs,
    arrays,
    plan.assignments,
    learner=learner_lib.Learner(optimizer=optimizer),
  )


def _adafactor_state(rng):
  """Returns praxis's ShardedAdafactorState in groups, as a dict of slots."""
  shapes = {
    NAMES[TABLE]: (D, V),
    NAMES[BIAS]: (V,),
    NAMES[OUT]: (3, D, N, H),
  }
  slots = {"m": {}, "m_scale": {}, "vr": {}, "vc": {}, "v": {}}
  for name, shape in shapes.items():
    depth = name.count(".repeat.")
    layer = shape[depth:]
    none = np.zeros((*shape[:depth], 1), np.float32)
    slots["m"][name] = rng.integers(-127, 128, shape).astype(np.int8)
    slots["m_scale"][name] = rng.random(
      (*shape[:depth], *layer[1:]), dtype=np.float32
    )
    is_factored = len(layer) > 1
    for slot, axis in (("vr", -1), ("vc", -2)):
      kept = list(shape)
      if is_factored:
        del kept[axis]
      slots[slot][name] = (
        rng.random(kept, dtype=np.float32) if is_factored else none
      )
    full = rng.random(shape, dtype=np.float32)
    slots["v"][name] = none if is_factored else full
  return slots


def _groups(slots, count):
  found = testing.NestedMap()
  for key in ("no_prefix", "p#3#i-1"):
    is_stacked = key != "no_prefix"

    def select(values, is_stacked=is_stacked):
      return testing.nest(
        {
          f"params.{name}": value
          if (".repeat." in name) == is_stacked
          else optax.MaskedNode()
          for name, value in values.items()
        }
      )

    number = np.full((3,) if is_stacked else (), count, np.int32)
    counter = testing.NestedMap(count=number)
    main = testing.NestedMap(
      count=number, **{slot: select(values) for slot, values in slots.items()}
    )
    found[key] = (counter, counter, main, counter)
  return found


def test_adafactor_of_pax(tmp_path):
  slots = _adafactor_state(np.random.default_rng(1))
  ours = {
    "0/row": {TABLE: (V, 1), BIAS: (1,), OUT: (3, N, 1, D)},
    "0/column": {TABLE: (1, D), BIAS: (1,), OUT: (3, 1, H, D)},
    "0/full": {TABLE: (1, 1), BIAS: (V,), OUT: (3, 1, 1, 1)},
    "1/ema": SHAPES,
  }
  optimizer = adafactor.Adafactor(
    schedule=optax.constant_schedule(0.1),
    b1=0.9,
    b2=0.99,
    factoring=adafactor.Factoring.LAST,
    momentum_after_rate=True,
    min_param_rms=None,
  )
  found = _import(tmp_path, [_groups(slots, 11)], _state_specs(ours), optimizer)
  assert found.lines == ("optimizer: Adafactor, after 11 updates",)
  read = {name: each() for name, each in found.reads.items()}
  read = {
    name: x.to_numpy() if isinstance(x, lazy_array.Blocks) else x
    for name, x in read.items()
  }
  assert read["opt_state/0/count"] == 11
  table, bias, out = (NAMES[x] for x in (TABLE, BIAS, OUT))
  # Means over the last dimension of ours, which is the first one of Pax's.
  expected = {
    f"0/row/{TABLE}": slots["vc"][table][:, None],
    f"0/column/{TABLE}": slots["vr"][table][None],
    f"0/row/{OUT}": np.einsum("LDN->LND", slots["vr"][out])[:, :, None],
    f"0/column/{OUT}": np.einsum("LDH->LHD", slots["vc"][out])[:, None],
    f"0/full/{BIAS}": slots["v"][bias],
    f"0/row/{BIAS}": np.zeros(1),
    f"0/full/{TABLE}": np.zeros((1, 1)),
    f"1/ema/{TABLE}": (
      slots["m"][table].astype("f4") * slots["m_scale"][table]
    ).T,
    f"1/ema/{OUT}": np.einsum(
      "LDNH->LNHD",
      slots["m"][out].astype("f4") * slots["m_scale"][out][:, None],
    ),
    f"1/ema/{BIAS}": slots["m"][bias].astype("f4") * slots["m_scale"][bias],
  }
  for name, value in expected.items():
    np.testing.assert_array_equal(read[f"opt_state/{name}"], value, name)


@pytest.mark.parametrize(
  ("optimizer", "message"),
  [
    pytest.param(
      adamw.AdamW(schedule=optax.constant_schedule(0.1)),
      "the experiment has Adam and the checkpoint has the slots m, m_scale",
      id="adam",
    ),
    pytest.param(
      sgd.Sgd(schedule=optax.constant_schedule(0.1)),
      "Pax has no state like that of Sgd",
      id="sgd",
    ),
    pytest.param(
      adafactor.Adafactor(schedule=optax.constant_schedule(0.1)),
      "factoring is not LAST",
      id="factoring",
    ),
  ],
)
def test_another_optimizer_starts_from_zero(optimizer, message, tmp_path):
  slots = _adafactor_state(np.random.default_rng(1))
  found = _import(tmp_path, [_groups(slots, 1)], _state_specs({}), optimizer)
  (line,) = found.lines
  assert line.startswith("optimizer: its state starts from zero, because")
  assert message in line
  assert not found.reads
  assert not found.used


def test_optax_adam_is_not_rescaled(tmp_path):
  rng = np.random.default_rng(2)
  shapes = {
    NAMES[TABLE]: (D, V),
    NAMES[BIAS]: (V,),
    NAMES[OUT]: (3, D, N, H),
  }
  trees = [
    {
      name: rng.random(shape, dtype=np.float32)
      for name, shape in shapes.items()
    }
    for _ in range(2)
  ]
  mu, nu = (
    testing.nest({f"params.{k}": v for k, v in tree.items()}) for tree in trees
  )
  chain = (optax.ScaleByAdamState(np.int32(4), mu, nu),)
  specs = _state_specs({"0/mu": SHAPES, "0/nu": SHAPES})
  optimizer = adamw.AdamW(schedule=optax.constant_schedule(0.1))
  found = _import(tmp_path, [chain], specs, optimizer)
  read = found.reads[f"opt_state/0/nu/{TABLE}"]().to_numpy()
  np.testing.assert_array_equal(read, trees[1][NAMES[TABLE]].T)
  assert found.lines == ("optimizer: Adam, after 4 updates",)


def test_a_state_that_does_not_start_from_zero_is_rejected():
  schedule = optax.constant_schedule(0.1)
  optimizer_slots.check_starts_from_zero(sgd.Sgd(schedule=schedule))
  copies = optax_optimizer.OptaxOptimizer(
    schedule=schedule,
    make=optax.contrib.schedule_free_sgd,
  )
  with pytest.raises(user_error.UserError, match="does not start from zero"):
    optimizer_slots.check_starts_from_zero(copies)
