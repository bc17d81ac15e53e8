"""Whether an error, or what a process left behind, is another one's loss."""

import re

# What the parts of JAX say when another process is gone: gloo, NCCL, the
# coordination service, and gRPC under it.
_SIGNS = (
  "connection closed by peer",
  "connection closed by remote peer",
  "connection reset by peer",
  "connection refused",
  "socket closed",
  "ncclremoteerror",
  "ncclsystemerror",
  "coordination service",
  "coordination_service",
  "distributed service detected fatal errors",
  "stopped sending heartbeats",
  "unavailable:",
  "unexpectedly tried to connect with a different incarnation",
)
# Gloo also says, at its start, how many processes it is connected to.
_GLOO = re.compile(
  r"^(?=.*gloo).*(fail|error|timed out|timeout|closed|reset|refused|broken)",
  re.MULTILINE,
)
_SILENT = re.compile(r"stopped sending heartbeats\):\n((?:.*\d+\n)+)")
_LEADER = re.compile(r"leader task was preempted/died|Socket closed")


def is_loss(error: BaseException) -> bool:
  """Whether an error says that another process is gone.

  Args:
    error: As caught in a run of several processes.
  """
  return is_loss_text(str(error))


def is_loss_text(text: str) -> bool:
  """Whether what a process wrote says that another one is gone.

  Args:
    text: Its standard error, or the text of an error.
  """
  lower = text.lower()
  return any(sign in lower for sign in _SIGNS) or bool(_GLOO.search(lower))


def lost_processes(text: str) -> tuple[int, ...]:
  """Returns which processes JAX calls lost; none if it does not say.

  Args:
    text: The standard error of a process that JAX has ended.
  """
  found: set[int] = set()
  for match in _SILENT.finditer(text):
    for line in match.group(1).splitlines():
      # `1`, or `/job:jax_worker/replica:0/task:1` of earlier versions.
      found.add(int(re.findall(r"\d+", line)[-1]))
  if not found and _LEADER.search(text):
    found.add(0)
  return tuple(sorted(found))
