"""Tests for experiments and their knobs."""

from typing import Any, ClassVar

import fiddle as fdl
import numpy as np
import pytest

from paxon.layers.decoding import beam_search, samplers, sampling, speculative
from paxon.runner import experiment, job, knobs, toy_experiment
from paxon.runner.configuration import dump, tree
from paxon.runner.settings import expected_kernels, generation, training


def _class(name="New", bases=(toy_experiment.Toy,), **body) -> Any:
  """Makes an experiment class as a class statement would."""
  annotations = body.pop("annotations", {})
  body = {"__module__": __name__, "__qualname__": name, **body}
  return type(name, bases, {**body, "__annotations__": annotations})


@pytest.mark.parametrize(
  ("body", "message"),
  [
    pytest.param(
      {"widht": 3},
      r"New\.widht is assigned, but no class declares a knob 'widht'; did you"
      r" mean 'width'\?",
      id="misspelled",
    ),
    pytest.param(
      {"num_trian_steps": 3}, "did you mean 'num_train_steps'", id="base-knob"
    ),
    pytest.param(
      {"zzz": "a"}, r"known: .*A new knob needs an annotation", id="no-clue"
    ),
    pytest.param({"activation": np.tanh}, "no class declares", id="callable"),
    pytest.param(
      {"make": dict}, r"no class declares a knob 'make'", id="foreign-class"
    ),
    pytest.param(
      {"width": "8"}, r"New\.width: expected int, got '8'\.", id="type"
    ),
    pytest.param({"width": True}, "expected int, got bool", id="bool-for-int"),
    pytest.param({"width": None}, "expected int, got None", id="none"),
    pytest.param({"width": 8.0}, "expected int, got float", id="float-for-int"),
    pytest.param(
      {"dtype": "float16"}, "did you mean 'bfloat16'", id="literal-word"
    ),
    pytest.param(
      {"new": "a", "annotations": {"new": int}},
      r"New\.new: expected int, got 'a'",
      id="new-knob-type",
    ),
    pytest.param(
      {"new": 1, "annotations": {"new": "Missing"}},
      "annotation that cannot be evaluated",
      id="annotation",
    ),
    pytest.param(
      {"task": 3}, r"New\.task must be a method, as in Toy", id="no-method"
    ),
    pytest.param(
      {"task": property(lambda self: None)},
      "task must be a method, as in Toy, but is a property",
      id="property-for-method",
    ),
    pytest.param(
      {"task": 3, "annotations": {"task": int}},
      "annotated as a knob, but Toy has a method",
      id="knob-for-method",
    ),
    pytest.param(
      {"width": classmethod(lambda cls: 3)},
      r"New\.width is a method, but Toy declares a knob",
      id="method-for-knob",
    ),
    pytest.param(
      {"job": lambda self: None}, r"job\(\) must not be overridden", id="job"
    ),
  ],
)
def test_wrong_class_is_refused_when_it_is_made(body, message):
  with pytest.raises(knobs.KnobError, match=message):
    _class(**body)


def test_methods_constants_and_private_names_are_no_knobs():
  class Fine(toy_experiment.Toy):
    name = "fine"
    _private = 3
    constant: ClassVar[int] = 7

    class Inner:
      """A class of its own."""

    def helper(self):
      return self.width

    @property
    def double(self):
      return 2 * self.width

    @classmethod
    def make(cls):
      return cls(width=16)

    @staticmethod
    def three():
      return 3

  class Finer(Fine):
    constant = 8

  assert set(Finer.knobs()) == set(toy_experiment.Toy.knobs())
  assert (Finer.make().double, Finer().helper(), Finer.name) == (32, 8, "Finer")
  assert (Fine.name, Finer.constant) == ("fine", 8)


def test_names_of_a_mixin_are_checked_where_it_is_used():
  class Mixin:
    widht = 3

  class Declares:
    extra: int = 3

  with pytest.raises(knobs.KnobError, match=r"Mixin\.widht .* mean 'width'"):
    _class(bases=(Mixin, toy_experiment.Toy))
  made = _class(bases=(Declares, toy_experiment.Toy))
  assert made.knobs()["extra"].owner == "Declares"


def test_subclasses_override_by_assignment():
  class Wide(toy_experiment.Toy):
    width = 64
    rate = 1

  assert (Wide().width, Wide(width=3).width, toy_experiment.Toy().width) == (
    *(64, 3),
    8,
  )
  # The annotation says float, so an int becomes one.
  assert isinstance(Wide().rate, float)
  assert Wide(rate=0).rate == 0.0


@pytest.mark.parametrize(
  ("given", "message"),
  [
    pytest.param(
      {"widht": 3}, "Toy has no knob 'widht'; did you mean 'width'", id="name"
    ),
    pytest.param(
      {"width": "3"}, r"Toy\.width: expected int, got '3'", id="str"
    ),
    pytest.param({"name": "x"}, "Toy has no knob 'name'", id="no-knob"),
  ],
)
def test_wrong_values_of_an_instance_are_refused(given, message):
  with pytest.raises(knobs.KnobError, match=message):
    toy_experiment.Toy(**given)
  with pytest.raises(knobs.KnobError, match=message):
    toy_experiment.Toy().replace(**given)


def test_knob_without_default_must_be_given():
  made = _class(annotations={"new": int})
  with pytest.raises(knobs.KnobError, match=r"New\.new has no value; set it"):
    made()
  assert made(new=0).new == 0


def test_zero_and_false_are_values():
  made = _class(
    annotations={"flag": bool, "limit": int | None}, flag=True, limit=None
  )
  assert made(flag=False, limit=0, width=0).flag is False
  assert (made(limit=0).limit, made().limit) == (0, None)


def test_property_computes_the_default_of_a_knob():
  class Computed(toy_experiment.Toy):
    @property
    def eval_every_steps(self):  # pyrefly: ignore[bad-override]
      return self.num_train_steps // 2

  assert Computed().eval_every_steps == 2
  assert Computed(num_train_steps=10).eval_every_steps == 5
  assert Computed(eval_every_steps=7).eval_every_steps == 7
  assert Computed().job().eval_every_steps == 2


def test_computed_knob_of_another_type_is_refused():
  class Computed(toy_experiment.Toy):
    @property
    def seed(self):  # pyrefly: ignore[bad-override]
      return "zero"

  with pytest.raises(knobs.KnobError, match=r"Computed\.seed: expected int"):
    Computed().job()


def test_instances_cannot_be_changed():
  toy = toy_experiment.Toy()
  with pytest.raises(AttributeError, match=r"replace\(width=\.\.\.\)"):
    toy.width = 3
  with pytest.raises(AttributeError, match="is immutable"):
    toy.widht = 3


def test_changing_a_mutable_value_does_not_change_the_class():
  made = _class(annotations={"sizes": list[int]}, sizes=[1])
  made().sizes.append(2)
  assert made().sizes == [1]


def test_repr_shows_what_was_given():
  assert repr(toy_experiment.Toy(width=3)) == "Toy(width=3)"


class _OptimizerKnobs(knobs.Group):
  """Settings of the optimizer.

  Attributes:
    step_size: Size of a step.
    decay: Decay of parameters.
  """

  step_size: float = 0.5
  decay: float | None = None


class _Grouped(_OptimizerKnobs, toy_experiment.Toy):
  """Reads the knobs of its group as one object."""

  def task(self):
    of = self.get_group(_OptimizerKnobs)
    assert type(of) is _OptimizerKnobs
    return self._scaled(of)

  def _scaled(self, of: _OptimizerKnobs):
    config = toy_experiment.Toy.task(self)
    config.model.head.rate = of.step_size
    return config


def test_group_declares_the_knobs_of_an_experiment():
  class Small(_Grouped):
    step_size = 0.25

  for made, expected in (
    (_Grouped(), 0.5),
    (Small(), 0.25),
    (Small(step_size=2), 2.0),
    (Small().replace(step_size=0.0), 0.0),
  ):
    assert made.step_size == expected
    assert made.job().task.model.head.rate == expected
  assert repr(Small(step_size=2, width=3).get_group(_OptimizerKnobs)) == (
    "_OptimizerKnobs(step_size=2.0)"
  )
  assert _Grouped.knobs()["decay"].owner == "_OptimizerKnobs"
  assert knobs.describe(Small)["decay"] == "Decay of parameters."


def test_mistakes_with_a_group_are_named():
  # Of the group, only `step_size` is read.
  with pytest.raises(knobs.KnobError, match=r"_Grouped\.decay has no effect"):
    _Grouped(decay=0.1).job()
  with pytest.raises(knobs.KnobError, match="did you mean 'step_size'"):
    _Grouped(stepsize=0.1)
  with pytest.raises(knobs.KnobError, match=r"_Wrong\.decay: expected float"):
    _class("_Wrong", (_Grouped,), decay="much")
  with pytest.raises(knobs.KnobError, match="Knobs has no knob 'de'"):
    _OptimizerKnobs(de=3)
  with pytest.raises(AttributeError, match="is immutable"):
    _Grouped().get_group(_OptimizerKnobs).decay = 0.1
  with pytest.raises(knobs.KnobError, match="Toy has no group _OptimizerKnobs"):
    toy_experiment.Toy().get_group(_OptimizerKnobs)


def test_group_has_computed_values_of_its_experiment():
  class Computed(_Grouped):
    @property
    def step_size(self):  # pyrefly: ignore[bad-override]
      return self.rate / self.width

  made = Computed(width=4, rate=2.0)
  assert made.get_group(_OptimizerKnobs).step_size == 0.5


@pytest.mark.parametrize("given", [{}, {"depth": 3}], ids=["default", "given"])
def test_knob_that_nothing_reads_is_refused(given):
  class Unread(toy_experiment.Toy):
    depth = 3

    def task(self):
      config = toy_experiment.Toy(width=self.width, rate=self.rate).task()
      assert self.num_train_steps == 4
      return config

  message = (
    r"Unread\.depth has no effect: task\(\) and datasets\(\) do not read it"
  )
  with pytest.raises(knobs.KnobError, match=message):
    Unread(**given).job()


def test_unset_knob_need_not_be_read():
  made = _class(annotations={"extra": int | None}, extra=None)
  made().job()
  with pytest.raises(knobs.KnobError, match=r"New\.extra has no effect"):
    made(extra=0).job()


def test_reading_the_class_is_no_reading_of_the_knob():
  class Reads(toy_experiment.Toy):
    extra: int = 3

    def datasets(self):
      assert type(self).extra == 3
      return super().datasets()

  with pytest.raises(knobs.KnobError, match=r"Reads\.extra has no effect"):
    Reads().job()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_reaches_every_part_that_has_none(dtype):
  class Mixed(toy_experiment.Toy):
    def task(self):
      config = super().task()
      config.model.layers[1].dtype = np.float16
      return config

  config = Mixed(dtype=dtype).job()
  shared, own = config.task.model.layers
  assert shared.dtype.name == dtype
  assert np.dtype(own.dtype) == np.float16
  # Parameters stay what they were.
  assert not tree.is_set(shared, "param_dtype")


class _WithoutDtype(toy_experiment.Toy):
  """All parts have a dtype of their own."""

  def task(self):
    config = super().task()
    for layer in config.model.layers:
      layer.dtype = None
    return config


def test_dtype_that_no_part_takes_is_refused():
  _WithoutDtype().job()
  message = r"dtype has no effect: no module of the task has"
  with pytest.raises(knobs.KnobError, match=message):
    _WithoutDtype(dtype="bfloat16").job()


def test_job_is_the_same_at_every_call():
  toy = toy_experiment.Toy(width=3)
  first, second = toy.job(), toy.job()
  assert first == second
  assert dump.to_text(first) == dump.to_text(second)
  first.task.model.head.width = 5
  assert toy.job().task.model.head.width == 3


def test_job_holds_the_knobs():
  toy = toy_experiment.Toy(
    num_train_steps=7, checkpoint_every_steps=2, seed=3, mesh="data=2"
  )
  built = fdl.build(toy.job())
  assert isinstance(built, job.Job)
  assert built.experiment == "paxon.runner.toy_experiment.Toy"
  assert (built.num_train_steps, built.checkpoint_every_steps) == (7, 2)
  assert (built.seed, built.mesh, built.eval_every_steps) == (3, "data=2", None)
  assert list(built.eval_inputs) == ["validation"]
  assert built.train_input.global_batch_size == 2


def test_compiler_options_and_expected_kernels_reach_the_job():
  untouched = toy_experiment.Toy().job()
  assert untouched.compiler_options == {}
  assert untouched.expected_kernels == ()
  expected = expected_kernels.ExpectedKernel(
    part="attention forward", kernel="cudnn"
  )

  class New(toy_experiment.Toy):
    compiler_options = {"xla_gpu_x": 2}  # noqa: RUF012  A knob, not shared.

    def expected_kernels(self) -> Any:
      return (expected,)

  given = {"xla_tpu_y": True}
  for made, options in (
    (New(), {"xla_gpu_x": 2}),
    (New(compiler_options=given), given),
  ):
    built = fdl.build(made.job())
    assert built.compiler_options == options
    assert built.expected_kernels == (expected,)
  with pytest.raises(knobs.KnobError, match=r"New\.compiler_options: expected"):
    New(compiler_options={"xla_gpu_x": [1]})


def test_adjust_changes_the_job():
  class Adjusted(toy_experiment.Toy):
    kept: int = 9

    def adjust(self, config):
      config.retention.newest = self.kept

  assert Adjusted().job().retention.newest == 9


def test_early_stopping_is_a_method_that_may_read_knobs():
  class Stopping(toy_experiment.Toy):
    eval_every_steps = 2
    patience: int = 5

    def early_stopping(self):
      return fdl.Config(training.EarlyStopping, patience=self.patience)

  rule = fdl.build(Stopping(patience=7).job()).early_stopping
  assert rule.patience == 7
  assert toy_experiment.Toy().job().early_stopping is None


def test_missing_parts_are_named():
  class NoTrain(toy_experiment.Toy):
    def datasets(self):
      return {"test": super().datasets()["train"]}

  class NoTask(toy_experiment.Toy):
    def task(self):  # pyrefly: ignore[bad-override]
      return 3

  with pytest.raises(ValueError, match=r"split 'train', got 'test'"):
    NoTrain().job()
  with pytest.raises(ValueError, match=r"task\(\) must return a fdl.Config"):
    NoTask().job()


def test_name_of_a_module_is_refused():
  class Named(toy_experiment.Toy):
    def task(self):
      config = super().task()
      config.model.layers[1].name = "mine"
      return config

  message = r"task\.model\.layers\[1\]\.name must not be set: the name of a"
  with pytest.raises(ValueError, match=message):
    Named().job()


def test_shrink_makes_a_toy_and_keeps_what_is_smaller():
  class Big(toy_experiment.Toy):
    num_train_steps = 1000
    global_batch_size = 512
    eval_every_steps = 100

    def shrink(self):
      return super().shrink().replace(width=2)

  toy = Big(seed=5).shrink()
  assert (toy.num_train_steps, toy.global_batch_size, toy.width) == (2, 8, 2)
  assert (toy.eval_every_steps, toy.checkpoint_every_steps) == (1, None)
  assert (toy.seed, toy_experiment.Toy().shrink().global_batch_size) == (5, 2)
  toy.job()


def test_experiment_without_task_is_abstract():
  class Half(experiment.Experiment):
    num_train_steps = 1
    global_batch_size = 1

    def datasets(self):
      return {}

  with pytest.raises(TypeError, match="task"):
    Half()  # pyrefly: ignore[bad-instantiation]


def _settings(**knobs):
  return toy_experiment.Toy(**knobs).generation()


def test_knobs_are_the_settings_of_generation():
  assert _settings() is None
  settings = fdl.build(
    _settings(prompts=("a", "b"), num_samples=2, temperature=0.5, top_p=0.9)
  )
  assert settings == generation.GenerationSettings(
    prompts=("a", "b"),
    num_samples=2,
    sampler=samplers.Temperature(temperature=0.5, top_p=0.9),
  )
  greedy = fdl.build(_settings(temperature=0.0, top_k=4, max_new_tokens=3))
  assert greedy == generation.GenerationSettings(
    max_new_tokens=3, sampler=samplers.Greedy()
  )


def test_knobs_of_penalties_and_searches():
  penalized = fdl.build(_settings(repetition_penalty=1.2, stop=("\n",)))
  assert penalized == generation.GenerationSettings(
    sampler=sampling.Settings(temperature=0.0, repetition_penalty=1.2),
    stop=("\n",),
  )
  drawn = fdl.build(_settings(temperature=0.5, min_p=0.1, top_k=3))
  assert drawn.sampler == sampling.Settings(temperature=0.5, min_p=0.1, top_k=3)
  searched = fdl.build(_settings(beam_size=3, num_samples=3))
  assert searched.search == beam_search.BeamSearch(beam_size=3)
  drafted = fdl.build(_settings(draft_tokens=5))
  assert drafted.speculation == speculative.PromptLookup(num_tokens=5)
  drafted = fdl.build(_settings(draft_run="runs/a", draft_tokens=2))
  assert drafted.speculation == generation.DraftRun(run="runs/a", num_tokens=2)
  for given, message in (
    ({"min_p": 0.1}, "min_p: set temperature, too"),
    ({"min_p": 0.1, "repetition_penalty": 2.0}, "min_p: set temperature, too"),
  ):
    with pytest.raises(knobs.KnobError, match=message):
      _settings(**given)
  for given, message in (
    ({"beam_size": 2, "temperature": 0.5}, "search and sampler must not both"),
    ({"beam_size": 2, "num_samples": 3}, "num_samples .3. must be at most"),
    ({"stop": ("a", "")}, "stop must have no empty text"),
    ({"repetition_penalty": 2.0, "num_samples": 2}, "greedy samples of a pro"),
  ):
    with pytest.raises(ValueError, match=message):
      fdl.build(_settings(**given))


def test_truncation_without_a_temperature_has_no_effect():
  with pytest.raises(knobs.KnobError, match=r"Toy.top_k: set temperature, too"):
    _settings(top_k=4)


def test_epochs_replace_steps():
  cls = _class(num_epochs=3)
  assert cls().num_epochs == 3
  assert cls(num_train_steps=5).num_epochs is None
  assert cls().replace(num_train_steps=5).num_epochs is None
  assert cls().shrink().num_train_steps == 2
  steps = _class(num_train_steps=7)
  assert steps(num_epochs=2).replace(num_train_steps=9).num_train_steps == 9
  assert steps(num_train_steps=9).replace(num_epochs=2).num_epochs == 2
  with pytest.raises(knobs.KnobError, match=r"num_epochs and num_train_steps"):
    steps(num_epochs=2, num_train_steps=3)
  with pytest.raises(knobs.KnobError, match=r"num_epochs and num_train_steps"):
    _class(num_epochs=3, num_train_steps=7)()
  with pytest.raises(knobs.KnobError, match=r"num_epochs must be positive"):
    steps(num_epochs=0)


def test_a_batch_per_device_follows_the_mesh():
  per_device = _class(mesh="fsdp=4,dcn.data=2", per_device_batch_size=1.5)
  assert per_device().global_batch_size == 12
  assert per_device(mesh="data=2").global_batch_size == 3
  # A batch that is given replaces that of the class, here and in a copy.
  assert per_device(global_batch_size=5).global_batch_size == 5
  assert per_device().replace(global_batch_size=5).global_batch_size == 5
  whole = toy_experiment.Toy(global_batch_size=4)
  other = whole.replace(mesh="data=8", per_device_batch_size=0.25)
  assert other.global_batch_size == 2
  assert other.job().train_input.global_batch_size == 2
  assert other.shrink().global_batch_size == 2
  assert other.shrink().per_device_batch_size is None


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (
      {"per_device_batch_size": 1, "mesh": "data=-1"},
      "requires a mesh of fixed sizes, such as fsdp=8, got mesh=data=-1",
    ),
    ({"per_device_batch_size": 1, "mesh": "auto"}, "got mesh=auto"),
    (
      {"per_device_batch_size": 0.3, "mesh": "data=2"},
      r"\(0.3\) times the 2 devices of mesh=data=2 must be a positive whole"
      r" number, got 0.6",
    ),
    ({"per_device_batch_size": 0, "mesh": "data=2"}, "got 0"),
    ({"per_device_batch_size": float("inf"), "mesh": "data=2"}, "got inf"),
    (
      {"per_device_batch_size": 1, "global_batch_size": 2},
      "per_device_batch_size and global_batch_size are both set",
    ),
  ],
)
def test_rejects_batches_per_device(given, message):
  with pytest.raises(knobs.KnobError, match=message):
    _ = toy_experiment.Toy(**given).global_batch_size
