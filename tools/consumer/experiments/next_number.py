"""Learns the next number of a sequence: x -> (5 x + 3) mod 32."""

import dataclasses

import fiddle as fdl
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lab.layers import residual
from paxon.inputs import base_input
from paxon.layers import embedding, feed_forward, unembedding
from paxon.layers.losses import cross_entropy
from paxon.learners import learner, schedules
from paxon.learners.optimizers import adamw
from paxon.runner import experiment
from paxon.runner import task as task_lib

PERIOD = 32


@dataclasses.dataclass(kw_only=True, eq=False)
class Numbers(base_input.BaseInput):
  """Rows of consecutive numbers, each beginning elsewhere in the sequence.

  Attributes:
    num_batches: How many there are; None for no end.
  """

  num_batches: int | None = None
  position: int = dataclasses.field(default=0, init=False)

  def get_next(self) -> base_input.Batch:
    """Returns this host's rows of the next batch."""
    if self.position == self.num_batches:
      raise StopIteration
    rows = np.arange(self.global_batch_size) + self.position
    columns = [rows % PERIOD]
    for _ in range(self.length):
      columns.append((5 * columns[-1] + 3) % PERIOD)
    numbers = np.stack(columns, axis=1).astype(np.int32)
    self.position += 1
    return self.host_rows(
      {
        "inputs": numbers[:, :-1],
        "targets": numbers[:, 1:],
        "weights": np.ones((len(rows), self.length), np.float32),
      }
    )

  def reset(self) -> None:
    """Goes back to the first batch."""
    self.position = 0

  def get_state(self) -> base_input.State:
    """Returns the number of batches that were returned."""
    return {"position": self.position}

  def set_state(self, state: base_input.State) -> None:
    """Goes on after that many batches."""
    self.position = state["position"]


class Model(nn.Module):
  """Layers of Paxon around one of our own."""

  embedding: nn.Module
  layer: nn.Module
  head: nn.Module

  def loss(self, batch: dict[str, jax.Array], *, deterministic: bool):
    """Returns the loss, metrics and outputs of a batch, as Paxon asks."""
    del deterministic  # There is no dropout.
    logits = self.head(self.layer(self.embedding(batch["inputs"])))
    nll = cross_entropy.softmax_cross_entropy(logits, batch["targets"])
    weights = batch["weights"]
    loss = jnp.sum(nll * weights), jnp.sum(weights)
    return loss, {"log_pplx": loss}, {"token_nll": nll}


class NextNumber(experiment.Experiment):
  """Reaches a loss of nearly zero within a hundred steps."""

  num_train_steps = 100
  global_batch_size = 8

  embed_dim: int = 16

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model and how it learns."""
    model = fdl.Config(
      Model,
      embedding=fdl.Config(
        embedding.Embedding, vocab_size=PERIOD, embed_dim=self.embed_dim
      ),
      layer=fdl.Config(
        residual.Residual,
        layer=fdl.Config(
          feed_forward.GatedFeedForward, mlp_dim=4 * self.embed_dim
        ),
      ),
      head=fdl.Config(unembedding.Unembedding, vocab_size=PERIOD),
    )
    schedule = fdl.Config(
      schedules.WarmupCosine,
      peak=3e-2,
      warmup_steps=10,
      total_steps=self.num_train_steps,
    )
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=model,
      learner=fdl.Config(
        learner.Learner, optimizer=fdl.Config(adamw.AdamW, schedule=schedule)
      ),
    )

  def datasets(self) -> dict[str, fdl.Config[base_input.BaseInput]]:
    """Returns an endless training split and a short one."""

    def numbers(num_batches: int | None) -> fdl.Config[Numbers]:
      return fdl.Config(
        Numbers,
        global_batch_size=self.global_batch_size,
        length=8,
        num_batches=num_batches,
      )

    return {"train": numbers(None), "validation": numbers(4)}
