"""Pax's dense language models of C4.

Sizes, batches and meshes are those of `paxml/tasks/lm/params/c4.py`; see
`tasks.lm.transformer_lm_spmd` for what the models are and what differs.

The text is in files that you name, of JSON lines, compressed or not:

  bazel run //runner:main -- --exp=tasks.lm.params.c4.C4Spmd1BAdam4Replicas \
      --fdl.train_files='c4/en/c4-train.0000?-of-01024.json.gz' \
      --fdl.validation_files='c4/en/c4-validation.*.json.gz'

Pax reads 32,000 sentence pieces where these read bytes: see `datasets.Text`.
What each takes is in `docs/plans.md`, from plans; none was run at its size.
"""

from paxon.layers import remat
from paxon.tasks.lm import datasets, transformer_lm_spmd


class C4SpmdAdam(datasets.Text, transformer_lm_spmd.TransformerLmSpmd):
  """1.3 B parameters in float32 on 8 chips, one row each: Pax's base."""

  learning_rate = 1e-3
  dtype = "float32"
  num_layers = 24
  embed_dim = 2048
  head_dim = 64
  vocab_size = 32_128
  remat_policy = None
  global_batch_size = 8
  mesh = "fsdp=4,tensor=2"
  summary_every_steps = 10


class C4Spmd1BAdam4Replicas(C4SpmdAdam):
  """1.1 B parameters on 4 chips of TPU v4, 32 rows each."""

  dtype = "bfloat16"
  remat_policy = remat.save_nothing
  num_layers = 13
  embed_dim = 2560
  head_dim = 128
  vocab_size = 32_000
  global_batch_size = 128
  mesh = "fsdp=4"


class C4Spmd1BAdam4ReplicasLimitSteps(C4Spmd1BAdam4Replicas):
  """`C4Spmd1BAdam4Replicas` for 15,000 steps."""

  num_train_steps = 15_000


class C4Spmd2BAdam4Replicas(C4Spmd1BAdam4Replicas):
  """2.1 B parameters on 4 chips of TPU v4, 32 rows each."""

  num_layers = 18
  embed_dim = 3072


class C4Spmd16BAdam32Replicas(C4Spmd1BAdam4Replicas):
  """16.5 B parameters on 32 chips of TPU v4, 16 rows each."""

  num_layers = 36
  embed_dim = 6144
  global_batch_size = 512
  mesh = "fsdp=16,tensor=2"


class C4Spmd32BAdam64Replicas(C4Spmd1BAdam4Replicas):
  """32.5 B parameters on 64 chips of TPU v4, 8 rows each."""

  num_layers = 40
  embed_dim = 8192
  global_batch_size = 512
  mesh = "fsdp=16,tensor=4"
