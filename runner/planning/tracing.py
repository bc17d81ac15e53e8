"""Traces a step for a plan, also where cuDNN is not here."""

import jax

from paxon.layers.attention import cudnn_attention
from paxon.runner.plan import topology
from paxon.runner.training import compiled_steps
from paxon.runner.training import session as session_lib


def trace(
  session: session_lib.Session,
) -> tuple[jax.stages.Traced, tuple[str, ...]]:
  """Traces the training step.

  Args:
    session: The job on the target's devices, or on those that stand in for
      them.

  Returns:
    The step, and why it cannot be compiled, in sentences; none if it can.
  """
  try:
    return compiled_steps.trace_train_step(session), ()
  except cudnn_attention.CudnnMissingError:
    with cudnn_attention.stand_in():
      traced = compiled_steps.trace_train_step(session)
    wheels = topology.missing_for_cudnn()
    names = ", ".join(wheels) or "a cuDNN that JAX finds"
    return traced, (
      "The model's attention is cuDNN's (__cudnn$fmhaSoftmax, decided), for"
      f" which the compiler needs {names}: nothing was compiled, and what is"
      " saved for the backward pass is that of attention by XLA. To compile:"
      " bazel run --config=plan_cudnn //runner:main -- --mode=plan ...",
    )
