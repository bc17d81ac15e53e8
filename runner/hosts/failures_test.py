"""Tests that a loss is told from other errors, by JAX's own words."""

import pytest

from paxon.runner.hosts import failures

# As written by jaxlib 0.10 and 0.11 when a process was killed.
GLOO = (
  "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:"
  "547] Connection closed by peer [127.0.0.1]:51437"
)
SILENT = """E1121 coordination_service.cc:1549] Use error polling to propagate \
the following error to all tasks: UNAVAILABLE: The following tasks are \
unhealthy (stopped sending heartbeats):
1
3
The tasks have crashed. Check the task logs for an earlier error.
F1121 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors.
"""
LEADER = """F1121 client.h:80] Terminating process because the JAX distributed \
service detected fatal errors. absl::Status: UNAVAILABLE: Failed to send RPC \
to coordination service. Either the leader task was preempted/died/restarted \
unexpectedly or this task is experiencing network issues.
"""


TIMED_OUT = (
  "UNKNOWN: Gloo AllReduce: [external/gloo/gloo/transport/tcp/buffer.cc:81]"
  " Timed out waiting 30000ms for recv operation to complete"
)
# As NCCL's documentation has them.
NCCL = (
  "INTERNAL: NCCL operation failed: socketProgress: Connection closed by remote"
  " peer host-3<39174>",
  "INTERNAL: ncclSystemError: System call (e.g. socket, malloc) failed",
  "INTERNAL: ncclRemoteError: A call failed possibly due to a network error",
)


@pytest.mark.parametrize("text", [GLOO, SILENT, LEADER, TIMED_OUT, *NCCL])
def test_losses(text):
  assert failures.is_loss(ValueError(text))
  assert failures.is_loss_text(text)


@pytest.mark.parametrize(
  "error",
  [
    ValueError("shapes (2,) and (3,) do not fit"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    KeyError("loss"),
    # Gloo's greeting, above an error of this process's own.
    ValueError(
      "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected"
      " peer ranks is : 1\nValueError: the loss failed to be finite"
    ),
  ],
)
def test_other_errors(error):
  assert not failures.is_loss(error)


def test_who_is_lost():
  assert failures.lost_processes(SILENT) == (1, 3)
  assert failures.lost_processes(LEADER) == (0,)
  assert failures.lost_processes(GLOO) == ()
  named = SILENT.replace("\n1\n3\n", "\n/job:jax_worker/replica:0/task:12\n")
  assert failures.lost_processes(named) == (12,)
