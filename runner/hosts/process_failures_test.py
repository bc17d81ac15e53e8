"""Tests for records of failed processes and signs of a lost peer."""

from etils import epath
import pytest

from paxon.runner.hosts import process_failures


def _exit(process, *, time, status=-9, is_secondary=False):
  return process_failures.ProcessExit(
    process=process,
    host="a",
    time=time,
    status=status,
    is_secondary=is_secondary,
  )


def test_round_trip_with_the_cause_first(tmp_path):
  folder = epath.Path(tmp_path)
  assert process_failures.read(folder, since=0.0) == []
  assert process_failures.find_cause([]) is None
  followed = _exit(0, time=5.0, status=-6, is_secondary=True)
  first, second = _exit(2, time=6.0), _exit(1, time=7.0)
  for loss in (_exit(1, time=1.0), second, followed, first):
    process_failures.write(folder, loss)
  found = process_failures.read(folder, since=2.0)
  assert found == [first, second, followed]
  assert process_failures.find_cause(found) == first
  assert process_failures.find_cause([followed]) is None
  assert process_failures.read(folder, since=8.0) == []


def test_damaged_records_are_omitted(tmp_path):
  folder = epath.Path(tmp_path)
  process_failures.write(folder, _exit(0, time=1.0))
  for name, text in (("process-1.json", "{"), ("process-2.json", '{"a": 1}')):
    (folder / process_failures.FOLDER / name).write_text(text)
  assert [
    loss.process for loss in process_failures.read(folder, since=0.0)
  ] == [0]


def test_descriptions():
  assert process_failures.describe_status(3) == "exit status 3"
  assert process_failures.describe_status(-9) == "killed by SIGKILL"
  assert process_failures.describe_status(-99) == "killed by signal 99"
  text = _exit(1, time=0.0).describe()
  assert text.startswith("process 1 (a) was lost at 19")
  assert text.endswith(": killed by SIGKILL")


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
# From the documentation of NCCL.
NCCL = (
  "INTERNAL: NCCL operation failed: socketProgress: Connection closed by remote"
  " peer host-3<39174>",
  "INTERNAL: ncclSystemError: System call (e.g. socket, malloc) failed",
  "INTERNAL: ncclRemoteError: A call failed possibly due to a network error",
)


@pytest.mark.parametrize("text", [GLOO, SILENT, LEADER, TIMED_OUT, *NCCL])
def test_peer_failures(text):
  assert process_failures.is_peer_failure(text)


@pytest.mark.parametrize(
  "error",
  [
    ValueError("shapes (2,) and (3,) do not fit"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    KeyError("loss"),
    # Gloo's startup line above an error of this process.
    ValueError(
      "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected"
      " peer ranks is : 1\nValueError: the loss failed to be finite"
    ),
  ],
)
def test_other_errors(error):
  assert not process_failures.is_peer_failure(str(error))


def test_lost_processes():
  assert process_failures.find_lost_processes(SILENT) == (1, 3)
  assert process_failures.find_lost_processes(LEADER) == (0,)
  assert process_failures.find_lost_processes(GLOO) == ()
  named = SILENT.replace("\n1\n3\n", "\n/job:jax_worker/replica:0/task:12\n")
  assert process_failures.find_lost_processes(named) == (12,)


def test_native_log_of_a_lost_process():
  # As jaxlib 0.10.2 prints it; the process is terminated by the last one.
  log = (
    b"W1128 17:54:58.759190   23070 preemption_sync_manager.cc:147] Failed to"
    b" retrieve preemption notice from coordination service: UNAVAILABLE\n",
    b"Additional GRPC error information from remote target"
    b" coordination_service while calling /xla.coordination.Coordination:\n",
    b':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:""}.\n',
    b"E1128 17:54:58.759302   23070 coordination_service_agent.cc:289] Polled"
    b" an error from coordination service.\n",
  )
  assert all(map(process_failures.is_peer_log, log))
  others = (
    b"Traceback (most recent call last):\n",
    b"E1128 17:54:58.759302   23070 hlo_pass.cc:1] coordination_service.\n",
    b"ValueError: Error received from peer\n",
  )
  assert not any(map(process_failures.is_peer_log, others))
