"""HTTP server of `--metrics_port`: metrics for Prometheus, and health.

  GET /metrics   the status of this process, in the text format of Prometheus
  GET /healthz   200 while it makes progress, 503 while a step hangs

Each process of a run serves its own status. OpenTelemetry has no second
exporter here: its collector reads `/metrics` with the receiver `prometheus`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import json
import os
import socketserver
import threading
from typing import Any
from wsgiref import simple_server

import jax
import prometheus_client
from prometheus_client import core, registry

from paxon.runner import user_error
from paxon.runner.monitoring import goodput, metrics_file, run_status
from paxon.runner.monitoring import launch as launch_lib

_TRAIN = "train"
# Metrics of training with a name of their own; all are in `paxon_metric`, too.
_GAUGES = {
  "loss": "Loss of the last logged step.",
  "grad_norm": "Norm of the gradient of the last logged step.",
  "step_seconds": "Mean time of a step since the one logged before.",
  "model_tflops_per_device": "Model TFLOP/s of a device.",
  "mfu": "Model FLOPs utilization, from 0 to 1.",
  "goodput": "Share of the wall time spent on steps that count.",
  "host_memory_bytes": "Resident memory of the process.",
  "device_memory_bytes": "Largest memory in use of a device of this process.",
  "late_seconds": "Mean time of a step that devices waited for this process.",
  "straggler_process": "Process for which the others waited most.",
  "straggler_seconds": "Mean time of a step that the others waited for it.",
  "straggler_steps": "Steps of the last interval at which it was the latest.",
}


@contextlib.contextmanager
def report_status(
  ledger: goodput.Ledger, launch: launch_lib.Launch, *, num_train_steps: int
) -> Iterator[run_status.RunStatus]:
  """Reports the status of a training while entered, as its flags ask for.

  Args:
    ledger: Accounts for the time of the main thread.
    launch: Flags of this process.
    num_train_steps: The last step of the training.

  Yields:
    The status, to which the loop writes its metrics.

  Raises:
    UserError: The file or the port of a flag cannot be used.
  """
  with contextlib.ExitStack() as stack:
    status = run_status.RunStatus(
      ledger,
      num_train_steps=num_train_steps,
      liveness_file=launch.liveness_file,
    )
    if launch.metrics_port is not None:
      port = stack.enter_context(serve(status, launch.metrics_port))
      print(f"metrics: http://localhost:{port}/metrics", flush=True)
    yield stack.enter_context(status)


@contextlib.contextmanager
def serve(status: run_status.RunStatus, port: int) -> Iterator[int]:
  """Serves a status at all addresses of this machine while entered.

  Args:
    status: The status of this process.
    port: The port; 0 for any that is free.

  Yields:
    The port.

  Raises:
    UserError: The port cannot be used.
  """
  found = registry.CollectorRegistry(auto_describe=False)
  found.register(_Collector(status))
  app = _make_app(status, prometheus_client.make_wsgi_app(found))
  try:
    server = simple_server.make_server(
      "", port, app, server_class=_Server, handler_class=_Handler
    )
  except OSError as error:
    raise user_error.UserError(
      f"--metrics_port={port} cannot be used: {error.strerror}; choose another"
      " port."
    ) from error
  thread = threading.Thread(
    target=server.serve_forever, name="metrics server", daemon=True
  )
  thread.start()
  try:
    yield server.server_port
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
  """Answers each request in a thread, so that a slow client blocks no other."""

  daemon_threads = True

  def server_bind(self) -> None:
    """Binds without the reverse look-up of the name, which may take seconds."""
    socketserver.TCPServer.server_bind(self)
    self.server_name, self.server_port = "", self.socket.getsockname()[1]
    self.setup_environ()


class _Handler(simple_server.WSGIRequestHandler):
  """Logs no requests."""

  timeout = 10.0

  def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
    """Drops the line."""


def _make_app(
  status: run_status.RunStatus, metrics: Callable[..., Iterable[bytes]]
) -> Callable[..., Iterable[bytes]]:
  def app(
    environ: dict[str, Any], start_response: Callable[..., object]
  ) -> Iterable[bytes]:
    path = environ["PATH_INFO"]
    if path == "/metrics":
      return metrics(environ, start_response)
    if path == "/healthz":
      now = status.snapshot()
      code = "503 Service Unavailable" if now.is_hanging else "200 OK"
      content: Mapping[str, Any] = {
        "status": "hanging" if now.is_hanging else "ok",
        "step": now.step,
        "activity": now.activity,
      }
    else:
      code, content = "404 Not Found", {"error": "use /metrics or /healthz"}
    start_response(code, [("Content-Type", "application/json")])
    return [json.dumps(content).encode()]

  return app


class _Collector(registry.Collector):
  """Makes the metrics of a scrape."""

  def __init__(self, status: run_status.RunStatus) -> None:
    self._status = status

  def collect(self) -> Iterator[core.Metric]:
    """Yields the metrics now."""
    now = self._status.snapshot()
    info = core.InfoMetricFamily("paxon_process", "This process of the run.")
    info.add_metric(
      [],
      {
        "process": f"{jax.process_index()}",
        "processes": f"{jax.process_count()}",
        "host": os.uname().nodename,
      },
    )
    yield info
    for name, text, value in (
      ("step", "Last finished step.", now.step),
      ("train_steps", "Last step of the training.", now.num_train_steps),
      ("step_age_seconds", "Time since a step has finished.", now.step_age),
      (
        "checkpoint_age_seconds",
        "Time since the state of the newest checkpoint was taken.",
        now.checkpoint_age,
      ),
      ("hanging", "1 while a step hangs.", float(now.is_hanging)),
    ):
      if value is not None:
        yield core.GaugeMetricFamily(f"paxon_{name}", text, value=value)
    # Repeated steps are taken from the productive time, so a counter would not
    # only grow.
    spent = core.GaugeMetricFamily(
      "paxon_time_seconds", "Wall time of the run by cause.", labels=["cause"]
    )
    for cause, seconds in now.seconds.items():
      spent.add_metric([cause.value], seconds)
    yield spent
    yield from _collect_values(now.values)


def _collect_values(
  values: Mapping[str, Mapping[str, float]],
) -> Iterator[core.Metric]:
  train = values.get(_TRAIN, {})
  for name, text in _GAUGES.items():
    if name in train:
      yield core.GaugeMetricFamily(f"paxon_{name}", text, value=train[name])
  rate = core.GaugeMetricFamily(
    "paxon_rate", "Trained tokens, or other units, per second.", labels=["unit"]
  )
  for name in filter(metrics_file.is_rate, train):
    rate.add_metric([name.removesuffix(metrics_file.RATE)], train[name])
  yield rate
  every = core.GaugeMetricFamily(
    "paxon_metric", "Newest metrics of a split.", labels=["split", "name"]
  )
  for split, of_split in values.items():
    for name, value in of_split.items():
      every.add_metric([split, name], value)
  yield every
