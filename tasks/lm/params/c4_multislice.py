"""Pax's dense language models trained on C4 on several TPU slices.

Sizes, batches and meshes are those of `paxml/tasks/lm/params/c4_multislice.py`:
parameters are sharded within a slice (`fsdp`) and replicated across slices
(`dcn.data`). Data is described in `c4`, models in
`tasks.lm.transformer_lm_spmd`; `docs/plans.md` has plans.
"""

from paxon.tasks.lm.params import c4


class C4Spmd22BAdamMaxText(c4.C4Spmd1BAdam4Replicas):
  """21.9 B parameters on 8 chips, 16 sequences per chip (MaxText's sizes)."""

  num_layers = 48
  embed_dim = 6144
  head_dim = 256
  vocab_size = 32_768
  global_batch_size = 128
  mesh = "fsdp=4,tensor=2"


class C4Spmd22BAdam1xv4_128(C4Spmd22BAdamMaxText):  # noqa: N801
  """21.9 B parameters on one v4-128 slice (64 chips), 16 sequences per chip."""

  global_batch_size = 1024
  mesh = "fsdp=64"


class C4Spmd22BAdam2xv4_128(C4Spmd22BAdam1xv4_128):  # noqa: N801
  """21.9 B parameters on two v4-128 slices, 16 sequences per chip."""

  global_batch_size = 2048
  mesh = "fsdp=64,dcn.data=2"


class C4Spmd22BAdam4xv4_128(C4Spmd22BAdam1xv4_128):  # noqa: N801
  """21.9 B parameters on four v4-128 slices, 16 sequences per chip."""

  global_batch_size = 4096
  mesh = "fsdp=64,dcn.data=4"


class C4Spmd22BAdam1xv4_128LimitSteps(C4Spmd22BAdam1xv4_128):  # noqa: N801
  """`C4Spmd22BAdam1xv4_128` for 300 steps."""

  num_train_steps = 300


class C4Spmd22BAdam2xv4_128LimitSteps(C4Spmd22BAdam2xv4_128):  # noqa: N801
  """`C4Spmd22BAdam2xv4_128` for 300 steps."""

  num_train_steps = 300


class C4Spmd22BAdam4xv4_128LimitSteps(C4Spmd22BAdam4xv4_128):  # noqa: N801
  """`C4Spmd22BAdam4xv4_128` for 300 steps."""

  num_train_steps = 300


class C4Spmd22BAdam1xv4_384(C4Spmd22BAdamMaxText):  # noqa: N801
  """24.8 B parameters on a v4-384 slice (192 chips), 10 sequences per chip."""

  num_layers = 24
  embed_dim = 9216
  head_dim = 384
  global_batch_size = 1920
  mesh = "fsdp=192"


class C4Spmd22BAdam2xv4_384(C4Spmd22BAdam1xv4_384):  # noqa: N801
  """24.8 B parameters on two v4-384 slices, 10 sequences per chip."""

  global_batch_size = 3840
  mesh = "fsdp=192,dcn.data=2"


class C4Spmd22BAdam1xv4_8(C4Spmd22BAdamMaxText):  # noqa: N801
  """0.9 B parameters on one v4-8 slice (4 chips), 16 sequences per chip."""

  num_layers = 16
  embed_dim = 2048
  global_batch_size = 64
  mesh = "fsdp=4"


class C4Spmd22BAdam2xv4_8(C4Spmd22BAdam1xv4_8):  # noqa: N801
  """0.9 B parameters on two v4-8 slices, 16 sequences per chip."""

  global_batch_size = 128
  mesh = "fsdp=4,dcn.data=2"


class C4Spmd22BAdam4xv4_8(C4Spmd22BAdam1xv4_8):  # noqa: N801
  """0.9 B parameters on four v4-8 slices, 16 sequences per chip."""

  global_batch_size = 256
  mesh = "fsdp=4,dcn.data=4"


class C4Spmd22BAdam1xv4_8LimitSteps(C4Spmd22BAdam1xv4_8):  # noqa: N801
  """`C4Spmd22BAdam1xv4_8` for 300 steps."""

  num_train_steps = 300


class C4Spmd22BAdam2xv4_8LimitSteps(C4Spmd22BAdam2xv4_8):  # noqa: N801
  """`C4Spmd22BAdam2xv4_8` for 300 steps."""

  num_train_steps = 300


class C4Spmd22BAdam4xv4_8LimitSteps(C4Spmd22BAdam4xv4_8):  # noqa: N801
  """`C4Spmd22BAdam4xv4_8` for 300 steps."""

  num_train_steps = 300


class C4SpmdGpt3AdamDataParallel2x16x16(c4.C4SpmdGpt3AdamOrgHP):
  """GPT-3 of 175 B parameters for 100 steps on two slices of 256 chips.

  Half a sequence per chip: `tensor` splits each sequence over 16 chips.
  """

  dtype = "bfloat16"
  num_train_steps = 100
  checkpoint_every_steps = 2000
  global_batch_size = 256
  mesh = "fsdp=16,tensor=16,dcn.data=2"


class C4Spmd32BAdam1xv5_256(C4Spmd22BAdamMaxText):  # noqa: N801
  """32.5 B parameters on one slice of 128 chips, 2 x 2,048 tokens per chip."""

  num_layers = 40
  embed_dim = 8192
  length = 2048
  global_batch_size = 256
  mesh = "fsdp=128"


class C4Spmd32BAdam2xv5_256(C4Spmd32BAdam1xv5_256):  # noqa: N801
  """32.5 B parameters on two slices of 128 chips, 2 sequences per chip."""

  global_batch_size = 512
  mesh = "fsdp=128,dcn.data=2"
