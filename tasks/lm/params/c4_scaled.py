"""Pax's convergence runs at 0.3 M to 30 M parameters, for any machine.

Pax's README has curves of `C4Spmd1BAdam4Replicas`, `C4Spmd16BAdam32Replicas`
and `C4SpmdPipelineGpt3SmallAdam64Replicas`. The classes here are subclasses
with Pax's initialization, optimizer and schedule (`exact`); only sizes change:
depth, widths, vocabulary, batch, length, mesh and stages, and the number of
steps, with which warmup and decay shrink. A name has the number of parameters
without embeddings. The text is the source code of Python's standard library,
as bytes.

  tools/curves docs/convergence.md --folder=runs/convergence \
      --exp=tasks.lm.params.c4_scaled.C4Scaled1M

`docs/convergence.md` has the curves.
"""

from paxon.tasks.lm import seqio_datasets, transformer_lm_spmd
from paxon.tasks.lm.params import c4


class _Scaled(seqio_datasets.C4, transformer_lm_spmd.TransformerLmSpmd):
  """Sizes of all recipes; the first base class.

  Attributes:
    pax_steps: Last step of Pax's curve, which `num_train_steps` stand for.
  """

  documents = "python_stdlib"
  exact = True
  remat_policy = None
  num_train_steps = 500
  checkpoint_every_steps = 250
  summary_every_steps = 10
  global_batch_size = 8
  length = 256
  vocab_size = 264
  head_dim = 32
  mesh = "fsdp=-1"

  pax_steps: int

  @property
  def eval_every_steps(self) -> int:  # pyrefly: ignore[bad-override]
    """Four evaluations."""
    return max(1, self.num_train_steps // 4)

  @property
  def warmup_steps(self) -> int:  # pyrefly: ignore[bad-override]
    """Pax's share of the steps."""
    return self._scale(super().warmup_steps)

  @property
  def decay_steps(self) -> int:  # pyrefly: ignore[bad-override]
    """Pax's share of the steps; the curve ends long before."""
    return self._scale(super().decay_steps)

  def _scale(self, steps: int) -> int:
    return round(steps * self.num_train_steps / self.pax_steps)


class C4Scaled300K(_Scaled, c4.C4Spmd1BAdam4Replicas):
  """`C4Spmd1BAdam4Replicas` with 0.33 M parameters."""

  num_layers = 3
  embed_dim = 96
  pax_steps = 54_000


class C4Scaled1M(C4Scaled300K):
  """`C4Spmd1BAdam4Replicas` with 1.0 M parameters."""

  num_layers = 5
  embed_dim = 128


class C4Scaled3M(C4Scaled300K):
  """`C4Spmd1BAdam4Replicas` with 3.1 M parameters."""

  num_layers = 4
  embed_dim = 256


class C4Scaled10M(C4Scaled300K):
  """`C4Spmd1BAdam4Replicas` with 10.6 M parameters."""

  num_layers = 6
  embed_dim = 384


class C4Scaled30M(C4Scaled300K):
  """`C4Spmd1BAdam4Replicas` with 31.5 M parameters."""

  num_layers = 10
  embed_dim = 512


class Gpt3Scaled300K(_Scaled, c4.C4SpmdPipelineGpt3SmallAdam64Replicas):
  """`C4SpmdPipelineGpt3SmallAdam64Replicas` with 0.33 M parameters."""

  num_layers = 3
  embed_dim = 96
  num_stages = None
  pipeline_microbatch_size = None
  max_positions = None
  pax_steps = 19_000


class Gpt3Scaled1M(Gpt3Scaled300K):
  """`C4SpmdPipelineGpt3SmallAdam64Replicas` with 1.0 M parameters."""

  num_layers = 5
  embed_dim = 128


class Gpt3Scaled3M(Gpt3Scaled300K):
  """`C4SpmdPipelineGpt3SmallAdam64Replicas` with 3.1 M parameters."""

  num_layers = 4
  embed_dim = 256


class Gpt3Scaled10M(Gpt3Scaled300K):
  """`C4SpmdPipelineGpt3SmallAdam64Replicas` with 10.6 M parameters."""

  num_layers = 6
  embed_dim = 384


class Gpt3Scaled30M(Gpt3Scaled300K):
  """`C4SpmdPipelineGpt3SmallAdam64Replicas` with 31.5 M parameters."""

  num_layers = 10
  embed_dim = 512
