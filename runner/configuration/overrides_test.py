"""Tests for assignments from the command line."""

import dataclasses
from typing import Any, NamedTuple

import fiddle as fdl
import hypothesis
from hypothesis import strategies as st
import pytest

from paxon.runner import toy_experiment, user_error
from paxon.runner.configuration import dump, overrides


class _Pair(NamedTuple):
  left: int
  right: int


@dataclasses.dataclass(kw_only=True)
class _Node:
  """A part with containers; some fields have no annotation that says much."""

  number: int = 1
  anything: Any = 3
  pair: _Pair = dataclasses.field(default_factory=lambda: _Pair(1, 2))
  parts: list = dataclasses.field(default_factory=list)
  by_name: dict[str, Any] = dataclasses.field(default_factory=dict)
  optional: Any = None


def _apply(config, argument):
  override = overrides.parse_argument(f"--fdl.{argument}")
  assert override is not None
  return overrides.apply(config, override)


def _toy():
  return toy_experiment.Toy().job()


@pytest.mark.parametrize(
  ("argument", "read", "expected"),
  [
    pytest.param("seed=3", lambda c: c.seed, 3, id="root"),
    pytest.param(
      "task.model.layers[1].width=3",
      lambda c: c.task.model.layers[1].width,
      3,
      id="part-in-a-tuple",
    ),
    pytest.param(
      "task.learner.max_grad_norm=1",
      lambda c: c.task.learner.max_grad_norm,
      1.0,
      id="int-for-float",
    ),
    pytest.param(
      "task.learner.max_grad_norm=None",
      lambda c: c.task.learner.max_grad_norm,
      None,
      id="none",
    ),
    pytest.param(
      "task.model.layers[1].bias=true",
      lambda c: c.task.model.layers[1].bias,
      True,
      id="bool",
    ),
    pytest.param(
      "task.model.layers[1].kind=b",
      lambda c: c.task.model.layers[1].kind,
      "b",
      id="literal-word",
    ),
    pytest.param(
      "task.model.layers[1].color=BLUE",
      lambda c: c.task.model.layers[1].color.name,
      "BLUE",
      id="enum",
    ),
    pytest.param(
      "task.model.layers[1].sizes[1]=9",
      lambda c: c.task.model.layers[1].sizes,
      (1, 9),
      id="element-of-a-default",
    ),
    pytest.param(
      "task.model.layers[1].dtype=bfloat16",
      lambda c: c.task.model.layers[1].dtype.name,
      "bfloat16",
      id="dtype",
    ),
    pytest.param(
      "eval_inputs.validation.length=9",
      lambda c: c.eval_inputs["validation"].length,
      9,
      id="key-like-a-field",
    ),
    pytest.param(
      "eval_inputs['validation'].length=9",
      lambda c: c.eval_inputs["validation"].length,
      9,
      id="quoted-key",
    ),
    pytest.param(
      "task.model.head=None", lambda c: c.task.model.head, None, id="no-part"
    ),
    pytest.param(
      "train_input.fill=2", lambda c: c.train_input.fill, 2.0, id="default"
    ),
  ],
)
def test_value_is_set(argument, read, expected):
  config = _toy()
  assert _apply(config, argument) is None
  assert read(config) == expected
  assert type(read(config)) is type(expected)


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    (
      "task.modle.head=3",
      r"Task at task has no field 'modle'; did you mean 'mo",
    ),
    ("zzz=3", r"Job has no field 'zzz'; known: baselines, "),
    (
      "task.model.layers[1].width=3.5",
      r"--fdl.task.model.layers\[1\].width=3.5: expected int, got float\.$",
    ),
    ("task.model.layers[1].width=eight", r"expected int, got the word 'eight'"),
    ("task.model.layers[1].bias=1", r"expected bool, got int\.$"),
    (
      "task.model.layers[2].width=3",
      r"layers has no element 2; valid are 0 to",
    ),
    ("task.model.layers[-1].width=3", r"no element -1; valid are 0 to 1"),
    ("task.model.layers.width=3", r"is a sequence of 2; write an index"),
    ("task.model.layers[1].words[0]=a", r"words has no element 0; it is empty"),
    (
      "task.model.layers[1]=3",
      r"is a node \(Layer\); set one of its fields, su",
    ),
    ("task.model.layers=3", r"expects tuple\[Module, ...\], which only an exp"),
    ("task.model=None", r"task.model is a node \(Model\)"),
    ("task.model.layers[1].activation=relu", r"the import path of a function"),
    (
      "task.model.layers[1].activation.x=3",
      r"is a function or class, which ca",
    ),
    ("task.model.layers[1].name=x", r"no field 'name'"),
    ("task.model.layers[1].parent=x", r"no field 'parent'"),
    ("task.model.layers[1].kind=c", r"expected 'a' \| 'b', got 'c'"),
    (
      "eval_inputs.validaton.length=3",
      r"no key 'validaton'; did you mean 'val",
    ),
    ("eval_inputs=3", r"expects dict\[str, BaseInput\], which only an exp"),
    ("task.tokenizer.x=3", r"task.tokenizer is not set; it has no field 'x'"),
    ("seed.x=3", r"seed is a int; it has no field 'x'"),
    ("task.model.layers[1].limit=None2", r"expected int \| None, got the word"),
  ],
)
def test_wrong_path_or_value_is_refused_and_changes_nothing(argument, message):
  config = _toy()
  before = dump.to_text(config)
  with pytest.raises(user_error.UserError, match=message):
    _apply(config, argument)
  assert dump.to_text(config) == before


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--fdl.seed", r"^--fdl.seed has no value; write --fdl.seed=VALUE"),
    ("--fdl.", r"write --fdl.NAME=VALUE"),
    ("--fdl.=3", r"^--fdl.=3 has no name"),
    ("--fdl.a..b=3", r"cannot read '..b=?3?'|cannot read '..b'"),
    ("--fdl..a=3", r"cannot read '.a'"),
    ("--fdl.a[x=3", r"cannot read '\[x'"),
    ("--fdl.a b=3", r"cannot read ' b'"),
    ("--fdl.a.=3", r"cannot read '.'"),
    ("--fdl.a[]=3", r"cannot read '\[\]'"),
  ],
)
def test_malformed_argument_is_refused(argument, message):
  with pytest.raises(user_error.UserError, match=message):
    overrides.parse_argument(argument)


@pytest.mark.parametrize(
  "argument", ["--exp=a", "fdl.seed=3", "x", "", "--fdl"]
)
def test_other_arguments_are_left_alone(argument):
  assert overrides.parse_argument(argument) is None


def test_value_may_hold_an_equals_sign():
  override = overrides.parse_argument("-fdl.mesh=fsdp=4,tensor=2")
  assert override == overrides.Override(path="mesh", text="fsdp=4,tensor=2")


def test_shared_part_changes_everywhere_and_it_is_said():
  config = _toy()
  remark = _apply(config, "task.model.head.width=3")
  assert config.task.model.layers[0].width == 3
  assert remark == (
    "--fdl.task.model.head.width=3 also changes task.model.layers[0], because"
    " it is the same node as task.model.head."
  )


def test_containers_keep_their_type_and_defaults_stay():
  inner = fdl.Config(_Node)
  config = fdl.Config(_Node, parts=[inner], by_name={"a-b": inner, "c": 1})
  _apply(config, "pair[0]=7")
  _apply(config, "by_name['a-b'].number=5")
  _apply(config, "anything=4")
  assert config.pair == _Pair(7, 2)
  assert isinstance(config.pair, _Pair)
  assert inner.number == 5
  assert config.parts == [inner]
  assert fdl.build(fdl.Config(_Node)).pair == _Pair(1, 2)
  with pytest.raises(user_error.UserError, match="expected int, got float"):
    _apply(config, "anything=4.5")
  with pytest.raises(user_error.UserError, match="is not annotated"):
    _apply(config, "optional=word")


def test_finished_object_is_not_entered():
  config = fdl.Config(_Node, optional=toy_experiment.Layer(width=3))
  message = "optional is an instance of Layer, not a configuration"
  with pytest.raises(user_error.UserError, match=message):
    _apply(config, "optional.width=3")


_WORDS = st.sampled_from(
  [
    *("task", "model", "layers", "[0]", "[1]", "[7]", "width", "sizes", "head"),
    *("eval_inputs", "validation", "learner", "optimizer", "b1", "seed", "x"),
    *("mesh", "rules", "name", "inner", "activation", "dtype", "table"),
  ]
)
_PATHS = st.lists(_WORDS, min_size=1, max_size=6).map(
  lambda words: ".".join(words).replace(".[", "[")
)
# As `st.text` has them, without encoding each one first to find that out.
_CHARACTERS = st.characters(exclude_categories=("Cs",))
_TEXTS = st.one_of(
  st.text(_CHARACTERS, max_size=20),
  st.integers().map(str),
  st.floats().map(repr),
  st.sampled_from(["None", "true", "(1, 2)", "{'a': 1}", "bfloat16", "a"]),
)


@pytest.mark.nightly
@hypothesis.settings(max_examples=300)
@hypothesis.given(_PATHS, _TEXTS)
def test_any_override_is_applied_or_refused_whole(path, text):
  config = _toy()
  before = dump.to_text(config)
  refused = None
  try:
    _apply(config, f"{path}={text}")
  except user_error.UserError as error:
    refused = error
  if refused:
    assert "\n" not in user_error.one_line(refused)
    assert str(refused).startswith("--fdl.")
    assert dump.to_text(config) == before
  else:
    # Whatever was accepted is a value that can be written down.
    dump.to_text(config)


@hypothesis.given(st.text(_CHARACTERS))
def test_any_argument_is_an_override_or_is_refused_or_is_none(text):
  try:
    found = overrides.parse_argument(f"--fdl.{text}")
  except user_error.UserError:
    return
  assert found is not None
  assert f"{found.path}={found.text}" == text


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rules:
  causal: bool = True
  window: int | None = None


@dataclasses.dataclass(kw_only=True)
class _Attention:
  rules: _Rules = _Rules(causal=False)


def test_a_field_of_a_default_object_can_be_set():
  config = fdl.Config(_Attention)
  _apply(config, "rules.window=4")
  assert fdl.build(config).rules == _Rules(causal=False, window=4)
  with pytest.raises(user_error.UserError, match="window"):
    _apply(fdl.Config(_Attention), "rules.windw=4")
