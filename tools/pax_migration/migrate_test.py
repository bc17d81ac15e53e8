"""Tests of rewritten modules: they are imported, and their jobs are built."""

import importlib
import pkgutil
import re
import sys
import textwrap

import fiddle as fdl
from flax import linen as nn
import pytest

from paxon.layers import remat
from paxon.layers.norms import rms_norm
from paxon.learners import schedules
from paxon.learners.optimizers import adafactor, adamw
from paxon.runner.configuration import find_experiment
from paxon.tasks.lm import pax_lm
from paxon.tools.pax_migration import migrate_main, project, results_page

_IMPORTS = """
from jax import numpy as jnp
import math
from paxml import base_experiment
from paxml import experiment_registry
from paxml import seqio_input
from paxml import tasks_lib
from paxml.tasks.lm import input_generator
from paxml.tasks.lm import model_params
from paxml.tasks.lm.params import c4
from paxml.tasks.lm.params import lm_cloud
from praxis import asserts
from praxis import base_input
from praxis import base_layer
from praxis import layers
from praxis import optimizers
from praxis import pax_fiddle
from praxis import py_utils
from praxis import schedules
NestedMap = py_utils.NestedMap
WeightInit = base_layer.WeightInit
"""
_SMALL = """
@experiment_registry.register
class Small(c4.TransformerLmSpmdAdam, lm_cloud.SyntheticDataset):
  \"\"\"Two small layers.\"\"\"

  NUM_LAYERS = 2
  MODEL_DIMS = 64  # Narrow.
  HIDDEN_DIMS = MODEL_DIMS * 4
  NUM_HEADS = None
  DIMS_PER_HEAD = 16
  VOCAB_SIZE = 512
  PERCORE_BATCH_SIZE = 4
  MAX_SEQ_LEN = 128
  ICI_MESH_SHAPE = [1, 4, 2]
"""


class _Output:
  """A rewritten module.

  Attributes:
    text: Its source.
    entries: The report.
  """

  def __init__(self, text, entries, module):
    self.text, self.entries, self._module = text, entries, module

  def find(self, name="Small"):
    return pkgutil.resolve_name(f"{self._module}:{name}")

  def job(self, name="Small"):
    return self.find(name)().job()

  def left(self):
    return [entry.text for entry in self.entries if entry.is_open]

  def notes(self):
    return [entry.text for entry in self.entries if not entry.is_open]


@pytest.fixture(name="migrate")
def _migrate(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(tmp_path / "out"))
  (tmp_path / "out").mkdir()
  count = iter(range(100))

  def run(body, *, imports=_IMPORTS):
    name = f"migrated_module_{next(count)}"
    path = tmp_path / f"{name}.py"
    path.write_text(imports + textwrap.dedent(body))
    texts, entries = migrate_main.migrate([path])
    (tmp_path / "out" / path.name).write_text(texts[path])
    importlib.invalidate_caches()
    sys.modules.pop(name, None)
    return _Output(texts[path], entries, name)

  return run


def _parameters(config):
  return results_page.count_parameters(fdl.build(config))


def test_constants_are_knobs_with_their_comments(migrate):
  out = migrate(_SMALL)
  assert issubclass(out.find(), pax_lm.TransformerLmSpmdAdam)
  assert out.left() == []
  assert (
    "class Small(pax_lm.SyntheticDataset, pax_lm.TransformerLmSpmdAdam)"
    in (out.text)
  )
  assert "  embed_dim = 64  # Narrow.\n  mlp_dim = embed_dim * 4\n" in out.text
  assert '  mesh = "fsdp=4,tensor=2"\n' in out.text
  assert "paxml" not in out.text
  assert "praxis" not in out.text
  config = out.job()
  assert config.train_input.global_batch_size == 32
  assert config.train_input.length == 128
  block = config.task.model.stack.blocks[0]
  assert (block.attention.num_heads, block.attention.head_dim) == (4, 16)


def test_parameters_are_those_of_praxis(migrate):
  # Table and bias of the softmax; for each layer four projections, the scale
  # per feature of a head, two matrices with biases, two norms.
  width, hidden, vocabulary, head = 64, 256, 512, 16
  layer = 4 * width**2 + head + 2 * width * hidden + hidden + width + 4 * width
  expected = vocabulary * (width + 1) + 2 * layer + 2 * width
  assert _parameters(migrate(_SMALL).job()) == expected


def test_subclass_keeps_what_python_inherits(migrate):
  # Pax's HIDDEN_DIMS does not follow MODEL_DIMS of a subclass.
  out = migrate(_SMALL + "\n\nclass Wide(Small):\n  MODEL_DIMS = 128\n")
  block = out.job("Wide").task.model.stack.blocks[0]
  assert block.feed_forward.mlp_dim == 256
  assert block.attention.num_heads == 8


def test_mixins_variables_and_lines_with_several_constants(migrate):
  output = migrate(
    f"""
MODEL_DIMS = 96
HEADS = 6

class Size:
  NUM_LAYERS = 3
  HIDDEN_DIMS = 5 * 64
{_SMALL}
class Mixed(Size, Small):
  VOCAB_SIZE = 128; MAX_SEQ_LEN = 64

class Other(Small):
  NUM_HEADS = HEADS
  HIDDEN_DIMS = MODEL_DIMS * 4
  MODEL_DIMS = MODEL_DIMS

class Short(Small): NUM_LAYERS = 5; HIDDEN_DIMS = 7
"""
  )
  assert output.left() == []
  mixed, other, short = (
    output.find(name)() for name in ("Mixed", "Other", "Short")
  )
  assert (mixed.num_layers, mixed.mlp_dim, mixed.embed_dim) == (3, 320, 64)
  assert (mixed.vocab_size, mixed.length) == (128, 64)
  assert (other.num_heads, other.mlp_dim, other.embed_dim) == (6, 384, 96)
  assert (short.num_layers, short.mlp_dim) == (5, 7)


@pytest.mark.parametrize(
  ("constant", "expected"), [("LEARNING_RATE = 0.5", 1.0), ("", 2e-3)]
)
def test_task_changes_the_value_of_a_constant(migrate, constant, expected):
  output = migrate(
    f"""{_SMALL}
  {constant}
  def task(self):
    task_p = super().task()
    task_p.train.learner.optimizer.learning_rate = 2 * self.LEARNING_RATE
    return task_p
"""
  )
  assert output.left() == []
  assert output.find()().learning_rate == expected


@pytest.mark.parametrize(
  ("code", "reason"),
  [
    ("Small.NUM_LAYERS = 9", "NUM_LAYERS is a knob"),
    ("Made = type('Made', (Small,), {'NUM_LAYERS': 5})", "is a knob"),
    ("def count(exp): return exp.MODEL_DIMS", "MODEL_DIMS is a knob"),
    ("if True:\n  class In(Small): NUM_LAYERS = 5", "NUM_LAYERS is a knob"),
    ("class Small(lm_cloud.Synthetic): pass", "Small is defined above, too"),
    ("from praxis.layers import *", "import names of Pax one by one"),
    ("class Sub(lm_cloud.LmCloudSpmd2B): NUM_LAYERS = 3", "pass the module"),
    (
      "class Sub(Small):\n  NUM_LAYERS = c4.TransformerLmSpmdAdam.NUM_LAYERS",
      "the value needs Pax",
    ),
  ],
)
def test_code_outside_of_experiments_is_marked(migrate, code, reason):
  output = migrate(f"from math import *\n{_SMALL}\n{code}\n")
  (entry,) = output.left()
  assert reason in entry
  assert "from math import *" in output.text
  assert output.find()().num_layers == 2


@pytest.mark.parametrize(
  ("constant", "path", "value"),
  [
    ("ACTIVATION_CLS = layers.GELU", "feed_forward.activation", nn.gelu),
    ("ATTEN_LOGIT_CAP = -1.0", "attention.logits.cap", None),
    ("USE_BIAS = True", "attention.projections.use_bias", True),
  ],
)
def test_constant_of_a_layer(migrate, constant, path, value):
  config = migrate(f"{_SMALL}  {constant}\n").job()
  node = config.task.model.stack.blocks[0]
  for name in path.split("."):
    node = getattr(node, name)
  assert node == value


def test_constants_of_training(migrate):
  out = migrate(
    _SMALL
    + """
  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_DOT_ONLY
  FPROP_DTYPE = jnp.bfloat16
  CHECKPOINT_EVERY_N_STEPS = 7
  CHECKPOINT_MAX_TO_KEEP = 3
  LEARNING_RATE = 2e-4
  ADAM_BETA1 = 0
  ADAM_CLIP_THRESHOLD = -1.0
  LR_SCHEDULE = 'linear_rampup_cosine_decay'
  LR_COS_WARMUP = 10
  LR_COS_DECAY_START = LR_COS_WARMUP + 1
  LR_COS_DECAY_END = 100
"""
  )
  config = out.job()
  optimizer = config.task.learner.optimizer
  assert config.task.model.stack.remat_policy is remat.save_matmuls
  assert config.checkpoint_every_steps == 7
  assert config.retention.newest == 3
  assert (optimizer.b1, optimizer.b2) == (0.9, 0.99)
  assert optimizer.max_update_rms is None
  assert any("ADAM_BETA1 = 0 is adam_b1 = 0.9" in note for note in out.notes())
  rate = fdl.build(optimizer.schedule)
  # Pax's schedule: linear to the peak at step 10, a tenth of it at step 100.
  assert [float(rate(step)) for step in (0, 5, 10, 100)] == pytest.approx(
    [0.0, 1e-4, 2e-4, 2e-5]
  )
  assert fdl.get_callable(optimizer.schedule) is schedules.RampHoldDecay


def test_pipeline_and_slices(migrate):
  out = migrate(
    """
class Staged(c4.TransformerLmSpmdPipelineAdam, lm_cloud.SyntheticDataset):
  NUM_LAYERS = 4
  NUM_HEADS = 16
  DIMS_PER_HEAD = 64
  NUM_STAGES = 2
  MICROBATCH_SIZE = 8
  ICI_MESH_SHAPE = [1, 1, 4, 1]
  DCN_MESH_SHAPE = [NUM_STAGES, 1, 1, 1]
  STREAM_IO = True


class Experts(Staged):
  NUM_STAGES = None
  MICROBATCH_SIZE = None
  STREAM_IO = False
  ICI_MESH_SHAPE = [1, 2, 4, 1]
  DCN_MESH_SHAPE = None
"""
  )
  config = out.job("Staged")
  assert config.mesh == "fsdp=4,dcn.stage=2"
  assert config.train_input.global_batch_size == 128
  assert config.task.model.stack.microbatch_size == 8
  assert out.find("Experts").mesh == "fsdp=2,expert=4"


def test_assignments_of_task_are_knobs(migrate):
  out = migrate(
    _SMALL
    + """
  MY_STEPS = 50
  MY_STD = 0.02
  USE_FACTORED = False

  def _configure(self, task_p):
    task_p.train.num_train_steps = self.MY_STEPS
    return task_p

  def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
    task_p = super().task()
    task_p = self._configure(task_p)
    model_p = task_p.model
    model_p.params_init = WeightInit.Gaussian(self.MY_STD)
    model_p.lm_tpl.softmax_tpl.soft_cap_logits = None
    stacked_p = model_p.lm_tpl.stacked_transformer_tpl
    if self.USE_REPEATED_LAYER:
      stacked_p = stacked_p.block
    layer_p = stacked_p.transformer_layer_params_tpl
    layer_p.tr_atten_tpl.combine_qkv = self.MODEL_DIMS > 100
    layer_p.ln_tpl = pax_fiddle.Config(layers.RmsNorm, epsilon=1e-5)
    layer_p.tr_atten_tpl.weight_split_dims_mapping.proj = ['data', 'mdl', None]
    lp = task_p.train.learner
    if self.USE_FACTORED:
      lp.optimizer = pax_fiddle.Config(
          optimizers.ShardedAdafactor, beta1=self.ADAM_BETA1)
    else:
      lp.optimizer = pax_fiddle.Config(optimizers.Adam, beta2=0.95)
    return task_p


class Factored(Small):
  MY_STEPS = 60
  USE_FACTORED = True
"""
  )
  assert out.left() == []
  config, factored = out.job(), out.job("Factored")
  assert (config.num_train_steps, factored.num_train_steps) == (50, 60)
  assert out.find().init_stddev == 0.02
  assert config.task.model.logit_cap is None
  block = config.task.model.stack.blocks[0]
  assert fdl.get_callable(block.attention_norm) is rms_norm.RmsNorm
  assert "SeparateProjections" in repr(block.attention.projections)
  learner = config.task.learner
  assert fdl.get_callable(learner.optimizer) is adamw.AdamW
  assert learner.optimizer.b2 == 0.95
  other = factored.task.learner.optimizer
  assert fdl.get_callable(other) is adafactor.Adafactor
  # A knob of the user, on the command line too.
  assert "use_factored: bool = False" in out.text


def test_set_self_is_a_property(migrate):
  out = migrate(
    _SMALL
    + """
  def task(self):
    assert self.NUM_LAYERS
    self.MODEL_DIMS = self.NUM_LAYERS * 32
    asserts.eq(self.MODEL_DIMS % 2, 0)
    return super().task()
"""
  )
  assert out.find()(num_layers=4).embed_dim == 128
  assert out.left() == []
  with pytest.raises(AssertionError):
    out.find()(num_layers=0).task()


def test_older_generation_and_constructors(migrate):
  out = migrate(
    """
class Data(base_experiment.BaseExperiment):
  PERCORE_BATCH_SIZE = 2
  MAX_SEQ_LEN = 64

  def _dataset_common(self, is_training):
    input_p = input_generator.SyntheticLmData.HParams()
    if is_training:
      input_p.batch_size = 3
    input_p.seq_len = self.MAX_SEQ_LEN
    return pax_fiddle.Config(
        base_input.LingvoInputAdaptor, input=input_p, is_training=is_training)

  def datasets(self):
    return [self._dataset_common(True), self._dataset_common(False)]


class Mine(model_params.TransformerLmSpmdAdafactor, Data):
  ICI_MESH_SHAPE = [2, 1, 1]

  def task(self):
    task_p = super().task()
    task_p.train.learner.optimizer = optimizers.Adam.HParams(beta1=0.8)
    model_params.set_default_adam(task_p, self.LEARNING_RATE, 0.01)
    return task_p
"""
  )
  assert "class Data(lm_data.Synthetic):" in out.text
  config = out.job("Mine")
  assert config.train_input.length == 64
  assert config.train_input.global_batch_size == 4
  assert config.task.learner.optimizer.weight_decay == 0.01


def test_seqio_input_plans_without_its_tasks(migrate):
  out = migrate(
    """
class Data(base_experiment.BaseExperiment):
  PERCORE_BATCH_SIZE = 1
  MAX_SEQ_LEN = 64
  MIXTURE = 'my_mixture'

  def _dataset_common(self, is_training):
    return pax_fiddle.Config(
        seqio_input.SeqIOInput,
        name='train' if is_training else 'validation',
        mixture_name=self.MIXTURE if is_training else 'my_task',
        split_name='train2' if is_training else 'test',
        task_feature_lengths={'targets': self.MAX_SEQ_LEN},
        feature_converter=seqio_input.LanguageModelFeatures(pack=True),
        is_training=is_training,
        seqio_only_option=3,
    )

  def datasets(self):
    return [
        self._dataset_common(is_training=True),
        self._dataset_common(is_training=False),
    ]


class Mine(c4.TransformerLmSpmdAdam, Data):
  DIMS_PER_HEAD = 64
  ICI_MESH_SHAPE = [1, 2, 1]
"""
  )
  data = out.find("Data")
  assert (data.mixture, data.train_split) == ("my_mixture", "train2")
  assert (data.eval_tasks, data.eval_split) == (("my_task",), "test")
  config = out.job("Mine")
  assert config.train_input.knob == "mixture"
  (text,) = out.left()
  assert "no counterpart of seqio_only_option" in text


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    ("MICROBATCH_SIAZE = 8", "nothing reads MICROBATCH_SIAZE; did you mean"),
    ("CHECKPOINT_POLICY = layers.Mine", "checkpoint policy layers.Mine has no"),
    ("NORM_POLICY = 'post'", "set the class of the blocks in model()"),
    ("DROPOUT_PROB = 0.1", "set the fields `dropout` of the blocks"),
    ("NUM_LAYERS = 'two'", "num_layers: expected int"),
    ("with open('x') as f: pass", "not a constant or a method"),
    ("ICI_MESH_SHAPE = [1, 2]", "[1, 2] has 2 axes, but data, fsdp, tensor"),
    ("def tune(self, task_p): task_p.x = 1", "tune() uses task_p of Pax"),
    ("def decode(self): return layers.Linear", "decode() uses layers of Pax"),
  ],
)
def test_untranslated_line_is_marked_and_listed(migrate, line, reason):
  out = migrate(f"{_SMALL}  {line}\n")
  assert any(reason in text for text in out.left()), out.left()
  if "MESH" not in line:
    assert f"# {project.MARKER}: " in out.text
    assert re.search(rf"^ *#   {re.escape(line[:12])}", out.text, re.M)


@pytest.mark.parametrize(
  ("statement", "reason"),
  [
    ("task_p.model.lm_tpl.mine = 3", "no counterpart of lm.mine"),
    ("task_p.model = pax_fiddle.Config(layers.Mine)", "model = Mine"),
    ("task_p.train.learner.mine, y = 1, 2", "not an assignment of one field"),
    ("tune(task_p)", "tune() is not known"),
    (
      "task_p.train.num_train_steps = 0",
      "training has at least one step",
    ),
  ],
)
def test_untranslated_statement_of_task(migrate, statement, reason):
  body = f"""
  def task(self):
    task_p = super().task()
    {statement}
    return task_p
"""
  out = migrate(_SMALL + body)
  (text,) = out.left()
  assert reason in text
  (entry,) = [entry for entry in out.entries if entry.is_open]
  lines = (_IMPORTS + _SMALL + body).splitlines()
  assert statement in lines[entry.line - 1]
  assert f"#   {statement[:15]}" in out.text
  assert out.job()


def test_constant_that_task_of_a_base_overwrites(migrate):
  out = migrate(
    _SMALL
    + """
  def task(self):
    task_p = super().task()
    task_p.train.save_interval_steps = 9
    return task_p


class Other(Small):
  CHECKPOINT_EVERY_N_STEPS = 5
"""
  )
  assert out.job("Other").checkpoint_every_steps == 9
  (text,) = out.left()
  assert "task() of Small sets checkpoint_every_steps, so Pax ignored" in text


def test_layer_lists_what_replaces_its_names(migrate):
  out = migrate(
    """
class Mine(base_layer.BaseLayer):
  dim: int = 0

  def setup(self):
    self.create_variable('w', base_layer.WeightHParams(shape=[self.dim]))

  def __call__(self, x, paddings):
    return NestedMap(x=x * self.theta.w, paddings=paddings)
"""
    + _SMALL
  )
  left = "\n".join(out.left())
  for name in ("create_variable", "WeightHParams", "NestedMap", "paddings"):
    assert f"{name}: " in left
  assert "#   class Mine(base_layer.BaseLayer):" in out.text
  assert out.job()


def test_modules_that_import_each_other(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(tmp_path))
  first, second = tmp_path / "in" / "first.py", tmp_path / "in" / "second.py"
  first.parent.mkdir()
  first.write_text(_IMPORTS + _SMALL)
  second.write_text(
    "from paxml.tasks.lm.params import first\n"
    "class Mine(first.Small):\n  NUM_LAYERS = 3\n"
  )
  texts, _ = migrate_main.migrate([first, second], "rewritten")
  folder = tmp_path / "rewritten"
  folder.mkdir()
  for path, text in texts.items():
    (folder / path.name).write_text(text)
  mine = find_experiment.find_experiment("rewritten.second.Mine")
  assert mine().job().task.model.stack.num_layers == 3


def test_base_class_of_another_module_is_reported(tmp_path):
  path = tmp_path / "alone.py"
  path.write_text(
    _IMPORTS + "from mine import other\n"
    "class Mine(other.Big, lm_cloud.SyntheticDataset):\n  NUM_LAYERS = 3\n"
  )
  _, entries = migrate_main.migrate([path])
  assert any(
    "base class Big: pass the module that defines it" in entry.text
    for entry in entries
    if entry.is_open
  )
