"""Workloads of the bench: both train steps, compiled, in blocks of steps.

Our model is that of `pure_jax_decoder_lm`, made of Paxon's layers.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from paxon.inputs import synthetic_lm_input
from paxon.layers import embedding, feed_forward
from paxon.layers.attention import grouped_query
from paxon.layers.cpu import forms
from paxon.layers.models import decoder_lm, pre_norm_decoder
from paxon.layers.norms import rms_norm
from paxon.layers.positions import rotary_embedding
from paxon.learners import learner, schedules, train_state
from paxon.learners.optimizers import adamw
from paxon.runner import job as job_lib
from paxon.runner import task
from paxon.runner.plan import flops, hardware
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.sharding import variables
from paxon.tools.benchmarks import pure_jax_decoder_lm

# Batches that are kept on the device and used in turn.
_NUM_BATCHES = 4
PURE_JAX_KEYS = ("inputs", "targets", "weights", "positions", "segment_ids")
# For each parameter of the plain JAX model, its path in ours.
NAMES: Mapping[str, tuple[str, ...]] = {
  "table": ("embedding", "table"),
  "q": ("stack", "layers", "blocks_0", "attention", "query"),
  "k": ("stack", "layers", "blocks_0", "attention", "key"),
  "v": ("stack", "layers", "blocks_0", "attention", "value"),
  "out": ("stack", "layers", "blocks_0", "attention", "out"),
  "gate": ("stack", "layers", "blocks_0", "feed_forward", "gate"),
  "up": ("stack", "layers", "blocks_0", "feed_forward", "up"),
  "down": ("stack", "layers", "blocks_0", "feed_forward", "down"),
  "attention_norm": ("stack", "layers", "blocks_0", "attention_norm", "scale"),
  "mlp_norm": ("stack", "layers", "blocks_0", "feed_forward_norm", "scale"),
  "final_norm": ("final_norm", "scale"),
}


def make_model(
  c: pure_jax_decoder_lm.Config,
  *,
  scan: bool = True,
  make_einsum: Callable[[], Callable[..., jax.Array]] = lambda: jnp.einsum,
) -> decoder_lm.DecoderLm:
  """Returns the model with the sizes of `c`; `scan` loops over its layers.

  Args:
    c: Sizes.
    scan: Whether to loop over layers.
    make_einsum: Returns the matmul of a layer; a module has one parent.
  """
  dtype = jnp.dtype(c.dtype)
  return pre_norm_decoder.compose(
    pre_norm_decoder.build,
    embedding=embedding.Embedding(
      vocab_size=c.vocab_size,
      embed_dim=c.embed_dim,
      input_scale=math.sqrt(c.embed_dim),
      dtype=dtype,
    ),
    norm=functools.partial(rms_norm.RmsNorm, dtype=dtype),
    attention=grouped_query.GroupedQueryAttention(
      num_heads=c.num_heads,
      num_kv_heads=c.num_kv_heads,
      head_dim=c.head_dim,
      rotary=rotary_embedding.Rotary(),
      dtype=dtype,
      einsum=make_einsum(),
    ),
    feed_forward=feed_forward.GatedFeedForward(
      mlp_dim=c.mlp_dim, dtype=dtype, einsum=make_einsum()
    ),
    num_layers=c.num_layers,
    scan=scan,
  )


def to_pure_jax(state: train_state.TrainState) -> dict[str, Any]:
  """Returns a copy of our train state in the layout of the plain JAX one."""
  # The chain of optax holds Adam's state first.
  adam: Any = state.opt_state[0]  # pyrefly: ignore
  trees = {
    "params": state.variables["params"],
    "mu": adam.mu["params"],
    "nu": adam.nu["params"],
  }
  result: dict[str, Any] = {
    group: {name: _at(tree, path) for name, path in NAMES.items()}
    for group, tree in trees.items()
  }
  # Copied, because both steps donate their state.
  return jax.tree.map(jnp.copy, result | {"step": state.step})


def from_pure_jax(params: Mapping[str, jax.Array]) -> dict[str, Any]:
  """Returns plain JAX parameters in the layout of our variables."""
  tree: dict[str, Any] = {}
  for name, (*outer, last) in NAMES.items():
    inner = tree
    for part in outer:
      inner = inner.setdefault(part, {})
    inner[last] = params[name]
  return tree


def decoding_variables(
  c: pure_jax_decoder_lm.Config, params: Mapping[str, jax.Array]
) -> dict[str, Any]:
  """Returns the same as our variables, in the form that `--mode=decode` uses.

  The form of `runner.generation.decoding_state`: kernels are rounded, and on
  one CPU layers are separate unless they are small.
  """
  held = {
    name: x if name.endswith("norm") else x.astype(c.dtype)
    for name, x in params.items()
  }
  values: dict[str, Any] = {"params": from_pure_jax(held)}
  size = sum(x.nbytes for x in held.values())
  if not forms.separates_layers(size):
    return values
  ids = jnp.ones((1, 1), jnp.int32)
  init = functools.partial(make_model(c).init, jax.random.key(0))
  specs = variables.get_specs(jax.eval_shape(init, ids, ids, ids))
  return variables.separate_layers(values, specs)


def _at(tree: Any, path: tuple[str, ...]) -> jax.Array:
  for name in path:
    tree = tree[name]
  return tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """Sizes of a model and of its batches.

  Attributes:
    config: Sizes of the model.
    global_batch_size: Sequences per batch.
    length: Tokens per sequence.
    scan: Whether our model loops over its layers.
  """

  config: pure_jax_decoder_lm.Config
  global_batch_size: int
  length: int
  scan: bool = True

  def job(self, **fields: Any) -> job_lib.Job:
    """Returns a job that trains the model on random tokens.

    Args:
      **fields: Other fields of the job, such as intervals and mesh.
    """
    c = self.config
    schedule = schedules.WarmupCosine(
      peak=c.peak,
      warmup_steps=c.warmup_steps,
      total_steps=c.total_steps,
      end=0.05 * c.peak,
    )
    optimizer = adamw.AdamW(
      schedule=schedule, b2=c.b2, weight_decay=c.weight_decay
    )
    given: dict[str, Any] = {
      "train_input": synthetic_lm_input.SyntheticLmInput(
        global_batch_size=self.global_batch_size,
        length=self.length,
        vocab_size=c.vocab_size,
        random_seed=0,
      ),
      "eval_inputs": {},
      "num_train_steps": c.total_steps,
      **fields,
    }
    return job_lib.Job(
      experiment="paxon.tools.benchmarks.decoder_lm_workload",
      task=task.Task(
        name="decoder_lm",
        model=make_model(c, scan=self.scan),
        learner=learner.Learner(optimizer=optimizer, max_grad_norm=1.0),
      ),
      **given,
    )

  @property
  def tokens(self) -> int:
    """Tokens per batch, with padding."""
    return self.global_batch_size * self.length

  def facts(self) -> dict[str, Any]:
    """Returns the sizes for reports."""
    c = self.config
    return {
      "layers": c.num_layers,
      "embed": c.embed_dim,
      "mlp": c.mlp_dim,
      "heads": f"{c.num_heads}/{c.num_kv_heads}x{c.head_dim}",
      "vocab": c.vocab_size,
      "batch": f"{self.global_batch_size}x{self.length}",
      "dtype": c.dtype,
      "loop": "scan" if self.scan else "unrolled",
    }


class Steps:
  """A block of `count` train steps; a call runs them and waits.

  The step donates its state; batches are used in turn.
  """

  def __init__(
    self,
    step: jax.stages.Compiled,
    state: Any,
    batches: Sequence[Any],
    *,
    count: int,
  ) -> None:
    self.step = step
    self._batches = batches
    self._count = count
    self.state = state

  def __call__(self) -> None:
    """Runs the steps of a block."""
    metrics = None
    for i in range(self._count):
      batch = self._batches[i % len(self._batches)]
      self.state, metrics = self.step(self.state, batch)
    jax.block_until_ready((self.state, metrics))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OurSteps:
  """Our train step.

  Attributes:
    session: The job on its devices.
    traced: The traced step.
    step: The compiled step.
    batches: Batches on the devices.
  """

  session: session_lib.Session
  traced: jax.stages.Traced
  step: jax.stages.Compiled
  batches: list[dict[str, jax.Array]]

  def start(self, *, count: int) -> Steps:
    """Returns blocks of `count` steps that begin at the initial state."""
    state = self.session.initial_state()
    return Steps(self.step, state, self.batches, count=count)

  def flops_per_step(self, length: int) -> float:
    """Returns the causal FLOPs of one step, without recomputation."""
    return flops.count(self.traced.jaxpr).causal_model_flops(length)


def compile_ours(
  job: job_lib.Job, *, devices: Sequence[jax.Device] | None = None
) -> OurSteps:
  """Compiles our train step and transfers batches to the devices."""
  session = session_lib.open_session(job, devices=devices)
  traced = compiled_steps.trace_train_step(session)
  batches = [
    session.place(job.train_input.get_next()) for _ in range(_NUM_BATCHES)
  ]
  job.train_input.reset()
  return OurSteps(
    session=session,
    traced=traced,
    step=compiled_steps.compile_train_step(session, traced),
    batches=batches,
  )


def pure_jax_steps(
  ours: OurSteps,
  workload: Workload,
  *,
  count: int,
  forward: pure_jax_decoder_lm.Forward = pure_jax_decoder_lm.forward,
) -> Steps:
  """Returns the plain JAX step with our initial state and batches."""
  state = to_pure_jax(ours.session.initial_state())
  batches = pure_jax_batches(ours)
  step = pure_jax_decoder_lm.compile_step(
    workload.config, state, batches[0], forward=forward
  )
  return Steps(step, state, batches, count=count)


def pure_jax_batches(ours: OurSteps) -> list[dict[str, jax.Array]]:
  """Returns our batches without what the plain JAX step does not use."""
  return [
    {name: batch[name] for name in PURE_JAX_KEYS} for batch in ours.batches
  ]


def rates(
  *, tokens: int, flops_per_step: float, seconds: float, dtype: str
) -> dict[str, float]:
  """Returns tokens and FLOPs per second of all devices, and MFU if known."""
  devices = jax.devices()
  result = {
    "tokens/s": tokens / seconds,
    "TFLOP/s": flops_per_step / seconds / 1e12,
  }
  kind = hardware.find_by_device_kind(devices[0].device_kind)
  peak = kind.peak_flops(dtype) if kind else None
  if peak:
    result["MFU"] = flops_per_step / seconds / peak / len(devices)
  return result
