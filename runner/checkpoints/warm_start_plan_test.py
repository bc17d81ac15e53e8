"""Tests for the plan of a warm start."""

from etils import epath
import jax.numpy as jnp
import pytest

from paxon.runner import user_error

# Names with their shapes; dtypes are float32 unless said otherwise.
from paxon.runner.checkpoints import (
  stored_checkpoint,
  warm_start,
  warm_start_plan,
)
from paxon.runner.settings import training
from paxon.sharding import variables

SOURCE = {
  "step": (),
  "params/decoder/table": (8, 4),
  "params/decoder/up": (2, 4, 6),
  "params/head/kernel": (4, 8),
  "params/old/a": (3,),
  "params/old/b": (3,),
  "fp8/decoder/scale": (2,),
  "opt_state/0/count": (),
  "opt_state/0/mu/params/decoder/table": (8, 4),
  "opt_state/0/mu/params/decoder/up": (2, 4, 6),
  "opt_state/0/mu/params/head/kernel": (4, 8),
  "average/count": (),
  "average/params/decoder/table": (8, 4),
}
TARGET = {
  "step": (),
  "params/encoder/table": (8, 4),
  "params/encoder/up": (2, 4, 6),
  "params/classifier/kernel": (4, 3),
  "fp8/encoder/scale": (2,),
  "opt_state/0/count": (),
  "opt_state/0/mu/params/encoder/table": (8, 4),
  "opt_state/0/mu/params/encoder/up": (2, 4, 6),
  "opt_state/0/mu/params/classifier/kernel": (4, 3),
}
RENAMED = (r"(params|fp8)/encoder/(.*)", r"\1/decoder/\2")
NEW_HEAD = (r"params/classifier/.*", None)


def _checkpoint(shapes=None, dtype="float32"):
  return stored_checkpoint.StoredCheckpoint(
    folder=epath.Path("base/checkpoints"),
    step=100,
    format_version=2,
    time=0.0,
    arrays={
      name: stored_checkpoint.StoredArray(
        name=name, shape=shape, dtype=dtype, axes=(None,) * len(shape)
      )
      for name, shape in (shapes or SOURCE).items()
    },
  )


def _plan(*, source=None, target=None, dtype="float32", to="float32", **fields):
  specs = [
    variables.VariableSpec(
      name=name, shape=shape, dtype=jnp.dtype(to), axes=(None,) * len(shape)
    )
    for name, shape in (target or TARGET).items()
  ]
  return warm_start_plan.make(
    training.WarmStart(checkpoint="base", **fields),
    checkpoint=_checkpoint(source, dtype),
    targets=specs,
  )


def test_reads_only_variables_by_default():
  plan = _plan(patterns=(RENAMED, NEW_HEAD))
  assert plan.reads == {
    "params/encoder/table": "params/decoder/table",
    "params/encoder/up": "params/decoder/up",
    "fp8/encoder/scale": "fp8/decoder/scale",
  }
  assert plan.matching.initial == ("params/classifier/kernel",)
  assert plan.matching.unused == (
    "params/head/kernel",
    "params/old/a",
    "params/old/b",
  )


def test_optimizer_state_follows_its_variable():
  plan = _plan(patterns=(RENAMED, NEW_HEAD), training_state=True)
  others = {
    n: s for n, s in plan.reads.items() if n not in plan.matching.sources
  }
  assert others == {
    "step": "step",
    "opt_state/0/count": "opt_state/0/count",
    "opt_state/0/mu/params/encoder/table": (
      "opt_state/0/mu/params/decoder/table"
    ),
    "opt_state/0/mu/params/encoder/up": "opt_state/0/mu/params/decoder/up",
  }
  assert plan.kept == ("opt_state/0/mu/params/classifier/kernel",)


def test_missing_optimizer_state_must_be_allowed():
  target = {**TARGET, "opt_state/0/nu/params/encoder/up": (2, 4, 6)}
  fields = {"patterns": (RENAMED, NEW_HEAD), "training_state": True}
  with pytest.raises(
    user_error.UserError,
    match=r"lacks 1 required name: opt_state/0/nu/params/decoder/up \(for"
    r" opt_state/0/nu",
  ):
    _plan(target=target, **fields)
  plan = _plan(target=target, may_be_missing=(r"opt_state/0/nu/.*",), **fields)
  assert "opt_state/0/nu/params/encoder/up" in plan.kept


def test_missing_variables_keep_initial_values():
  plan = _plan(patterns=(RENAMED,), may_be_missing=(r"params/classifier/.*",))
  assert set(plan.matching.absent) == {"params/classifier/kernel"}
  assert "params/classifier/kernel" not in plan.reads


def test_averages_replace_their_variables():
  plan = _plan(patterns=(RENAMED, NEW_HEAD), averaged=True)
  assert plan.averages == {
    "params/encoder/table": "average/params/decoder/table"
  }
  assert plan.reads["params/encoder/table"] == "params/decoder/table"


def test_floats_are_cast_where_that_is_allowed():
  patterns = (RENAMED, NEW_HEAD)
  assert _plan(patterns=patterns, to="bfloat16", cast=True).reads


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    pytest.param(
      {"patterns": (RENAMED,)},
      r"base/checkpoints/100 lacks 1 required name: params/classifier/kernel"
      r" \(did you mean params/.*\); add a pattern.*may_be_missing",
      id="missing",
    ),
    pytest.param(
      {"may_be_missing": (r".*",)},
      r"would read nothing: .* It has params/decoder/table, .* and 3 more; the"
      r" model has params/encoder/table",
      id="nothing",
    ),
    pytest.param(
      {"patterns": ((r".*", None),)}, r"would read nothing", id="all initial"
    ),
    pytest.param(
      {"patterns": ((r"params/encodr/(.*)", r"\1"),)},
      r"WarmStart\.patterns\[0\] .* matches no variable .* did you mean"
      r" 'params/encoder/",
      id="pattern",
    ),
    pytest.param(
      {"patterns": (RENAMED, NEW_HEAD), "may_be_missing": (r"params/clas",)},
      r"WarmStart\.may_be_missing\[0\] \('params/clas'\) matches no variable",
      id="may be missing",
    ),
    pytest.param(
      {"patterns": (RENAMED, (r"(.*)/classifier/(.*)", r"\1/head/\2"))},
      r"does not fit .*params/classifier/kernel \(from params/head/kernel\) has"
      r" shape \(4, 8\) in the checkpoint and \(4, 3\) in the model",
      id="shape",
    ),
    pytest.param(
      {"patterns": (RENAMED, NEW_HEAD), "to": "bfloat16"},
      r"has dtype float32 in the checkpoint and bfloat16 in the model;"
      r" .*cast=True",
      id="dtype",
    ),
    pytest.param(
      {"patterns": (RENAMED, NEW_HEAD), "to": "int32", "cast": True},
      r"has dtype float32 in the checkpoint and int32 in the model[^;]*;",
      id="no cast to integers",
    ),
    pytest.param(
      {
        "source": {k: v for k, v in SOURCE.items() if "average" not in k},
        "patterns": (RENAMED, NEW_HEAD),
        "averaged": True,
      },
      r"WarmStart\.averaged is set, but base/checkpoints/100 has no averaged",
      id="average",
    ),
  ],
)
def test_mismatches_are_one_line(fields, message):
  with pytest.raises(user_error.UserError, match=message) as caught:
    _plan(**fields)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("shape", "fields", "message"),
  [
    pytest.param(
      (8, 2, 6, 4),
      {},
      r"has shape \(8, 6, 4\) .* and \(8, 2, 6, 4\) in the model \(axes .*\);"
      r" WarmStart\.repeated_axes=\('experts',\) makes copies",
      id="no rule",
    ),
    pytest.param(
      (8, 2, 6, 5),
      {"repeated_axes": ("experts",)},
      r"has shape \(8, 6, 4\) .* and \(8, 2, 6, 5\) in the model[^;]*$",
      id="shape",
    ),
    pytest.param(
      (8, 2, 6, 4),
      {"repeated_axes": ("experts", "expert")},
      r"repeated_axes\[1\] \('expert'\) has no effect: .*mean 'experts'",
      id="axis",
    ),
    pytest.param(
      (1, 2, 6, 4),
      {"entries": "[8]", "repeated_axes": ("experts",)},
      r"up \(from params/up\[8\]\) has shape \(8, 6, 4\)",
      id="entry",
    ),
    pytest.param(
      (2, 2, 6, 4),
      {"entries": "[::4]"},
      r"up \(from params/up\[::4\]\) .* WarmStart\.repeated_axes",
      id="slice",
    ),
  ],
)
def test_repeated_axes_must_fit(shape, fields, message):
  axes = ("layers", "experts", "embed", "mlp")
  entries = fields.pop("entries", "")
  spec = variables.VariableSpec(
    name="params/up", shape=shape, dtype=jnp.dtype("float32"), axes=axes
  )
  start = training.WarmStart(
    checkpoint="base", patterns=((".*", rf"\g<0>{entries}"),), **fields
  )
  with pytest.raises(user_error.UserError, match=message):
    warm_start_plan.make(
      start, checkpoint=_checkpoint({"params/up": (8, 6, 4)}), targets=[spec]
    )


def test_as_many_experts_as_layers():
  spec = variables.VariableSpec(
    name="params/up",
    shape=(8, 8, 6),
    dtype=jnp.dtype("float32"),
    axes=("layers", "experts", "mlp"),
  )
  plan = warm_start_plan.make(
    training.WarmStart(checkpoint="base", repeated_axes=("experts",)),
    checkpoint=_checkpoint({"params/up": (8, 6)}),
    targets=[spec],
  )
  assert plan.repeats == {"params/up": (1,)}


def test_many_problems_are_truncated():
  target = {f"params/x{i}": (1,) for i in range(9)}
  target["params/old/a"] = (3,)
  with pytest.raises(user_error.UserError, match=r"lacks 9 .*and 4 more; add"):
    _plan(target=target)


def test_summary_counts_and_groups():
  plan = _plan(
    patterns=(RENAMED, NEW_HEAD), training_state=True, may_be_missing=(".*",)
  )
  assert warm_start.summarize(plan) == [
    "warm start from step 100 of base/checkpoints",
    "  read      3 of 4 variables, 82 of 94 values",
    r"            (params|fp8)/encoder/(.*) <- \1/decoder/\2: 3",
    "            params/classifier/.* <- initial values: 1",
    "  training  starts at step 100; 4 non-variable arrays read",
    "  initial   params/classifier/kernel",
    "  fresh     opt_state/0/mu/params/classifier/kernel",
    "  unused    params/head/kernel",
    "            params/old/* (2)",
  ]


def test_summary_is_short():
  source = {**SOURCE, **{f"params/z{i}": () for i in range(20)}}
  plan = _plan(source=source, patterns=(RENAMED, NEW_HEAD))
  shown = warm_start.summarize(plan)
  assert shown[-1].split() == ["and", "14", "more"]
  assert len(shown) < 20


def test_table_has_every_name():
  plan = _plan(patterns=(RENAMED,), may_be_missing=(r"params/classifier/.*",))
  table = [line.split() for line in warm_start.format_table(plan)]
  assert table == [
    ["read", "params/encoder/table", "[8,4]", "<-", "params/decoder/table"],
    ["read", "params/encoder/up", "[2,4,6]", "<-", "params/decoder/up"],
    ["missing", "params/classifier/kernel", "[4,3]"],
    ["read", "fp8/encoder/scale", "[2]", "<-", "fp8/decoder/scale"],
    ["unused", "<-", "params/head/kernel"],
    ["unused", "<-", "params/old/a"],
    ["unused", "<-", "params/old/b"],
  ]
  whole = _plan(patterns=(RENAMED, NEW_HEAD), training_state=True)
  table = [line.split() for line in warm_start.format_table(whole)]
  assert ["read", "step", "[]"] in table
  assert ["initial", "params/classifier/kernel", "[4,3]"] in table
  assert len(table) == len(TARGET) + len(whole.matching.unused)


TARGETS = (
  "params/embedding/table",
  "params/stack/layers/blocks_0/attention/query",
  "params/stack/layers/blocks_0/attention/key",
  "params/head/kernel",
)


def _match(patterns, sources=TARGETS, targets=TARGETS):
  return warm_start_plan.match(
    targets, sources, patterns=patterns, field="patterns"
  )


def test_names_are_kept_without_patterns():
  matching = _match((), sources=(*TARGETS[:3], "params/old/bias"))
  assert matching.sources == {name: name for name in TARGETS[:3]}
  assert matching.absent == {TARGETS[3]: TARGETS[3]}
  assert matching.unused == ("params/old/bias",)
  assert matching.initial == ()


def test_first_matching_pattern_wins():
  patterns = (
    (r"params/stack/(.*)/query", r"params/decoder/\1/q"),
    (r"params/(?P<part>stack)/(.*)", r"params/\g<part>_\2"),
    (r"params/head/.*", None),
  )
  sources = (
    "params/decoder/layers/blocks_0/attention/q",
    "params/stack_layers/blocks_0/attention/key",
    "params/head/kernel",
  )
  matching = _match(patterns, sources)
  assert matching.sources == {TARGETS[1]: sources[0], TARGETS[2]: sources[1]}
  assert matching.initial == ("params/head/kernel",)
  assert matching.unused == ("params/head/kernel",)
  assert matching.absent == {TARGETS[0]: TARGETS[0]}
  assert matching.uses == (1, 1, 1)


def test_an_expression_must_match_the_whole_name():
  with pytest.raises(training.PatternError, match="matches no variable"):
    _match(((r"params/head", None),))


def test_one_source_may_fill_two_targets():
  matching = _match(((r"(.*)/key", r"\1/query"),))
  assert matching.sources[TARGETS[2]] == TARGETS[1]
  assert matching.unused == (TARGETS[2],)


@pytest.mark.parametrize(
  ("pattern", "message"),
  [
    pytest.param(("params/(", None), r"not a regular expression", id="regex"),
    pytest.param((r"a(.)", r"\2"), r"invalid group reference 2", id="group"),
    pytest.param((r"a(.)", r"\g<b>"), r"unknown group name 'b'", id="name"),
    pytest.param((r"a(.)", r"\q"), r"bad escape", id="escape"),
    pytest.param(("a", ""), r"empty template", id="empty"),
    pytest.param(("a", 1), r"patterns\[0\] must be a pair", id="type"),
    pytest.param(("a",), r"patterns\[0\] must be a pair", id="single"),
  ],
)
def test_invalid_patterns_are_rejected(pattern, message):
  with pytest.raises(training.PatternError, match=message):
    training.check_patterns((pattern,), field="patterns")


@pytest.mark.parametrize(
  ("expression", "close"),
  [
    ("params/haed/kernel", "params/head/kernel"),
    ("params/heads/.*", "params/head/kernel"),
    (r"params/stack/layers/blocks_0/atention/(query|key)", "attention/"),
  ],
)
def test_pattern_without_match_names_the_closest(expression, close):
  with pytest.raises(
    training.PatternError,
    match=rf"patterns\[0\] .* matches no variable .*did you mean .*{close}",
  ):
    _match(((expression, None),))


def test_shadowed_pattern_is_rejected():
  with pytest.raises(
    training.PatternError,
    match=r"patterns\[1\] .* has no effect: .*head/kernel.*'params/\(\.\*\)'",
  ):
    _match(((r"params/(.*)", r"params/\1"), (r"params/head/.*", None)))
