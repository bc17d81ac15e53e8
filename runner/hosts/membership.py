"""Agreement of the supervisors of a run, by files, on its processes.

Each supervisor writes at every start how often the run has started again, its
generation. All of them count each loss, so those with the same number are left:

  member-<i>.json  the host and generation of process i
  fewer.json       the processes of a run that continues without the others
  return-<i>.json  process i came back, and waits
  more.json        the processes of the next start, which takes those

The first process of a smaller run writes `fewer.json` and `more.json`. No clock
and no further service is needed.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import json
import socket
from typing import Any

from etils import epath

from paxon.runner import files, user_error
from paxon.runner.hosts import process_failures

_MEMBER, _RETURN = "member-", "return-"
_FEWER, _MORE = "fewer.json", "more.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Members:
  """The processes of a start.

  Attributes:
    generation: How often the run has started again.
    hosts: Host names, by process.
    count: How often the first process has written them again.
  """

  generation: int
  hosts: Mapping[int, str]
  count: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
  """The view of one supervisor.

  Attributes:
    run_dir: The run directory.
    coordinator_address: `HOST:PORT` of process 0.
    process_id: Index of this process.
    num_processes: Number of processes of the undisturbed run.
    min_processes: The least number of processes to continue with.
  """

  run_dir: epath.Path
  coordinator_address: str
  process_id: int
  num_processes: int
  min_processes: int

  def announce(self, generation: int) -> None:
    """Writes that this process takes part in a start."""
    self._write_own(_MEMBER, {"restarts": generation})

  def find_present(self, generation: int) -> dict[int, str]:
    """Returns the hosts of the processes of a generation, by process."""
    found = self._read_all(_MEMBER)
    return {
      process: str(member.get("host"))
      for process, member in found.items()
      if member.get("restarts") == generation
    }

  def make_flags(self, hosts: Mapping[int, str]) -> list[str] | None:
    """Returns the flags of a start with some processes, None if too few.

    They are numbered again in the same order. The first one is the coordinator,
    at the port of the one before.
    """
    if self.process_id not in hosts or len(hosts) < self.min_processes:
      return None
    address = self.coordinator_address
    first = min(hosts)
    if first:
      address = f"{hosts[first]}:{address.rpartition(':')[2]}"
    index = sorted(hosts).index(self.process_id)
    return [
      f"--num_processes={len(hosts)}",
      f"--process_id={index}",
      f"--coordinator_address={address}",
    ]

  def note_fewer(self, generation: int, hosts: Mapping[int, str]) -> None:
    """Writes, on the first process, that the run continues with fewer."""
    if self.process_id == min(hosts):
      self._write_members(_FEWER, generation, hosts)

  def find_fewer(self) -> Members | None:
    """Returns the processes of a run that continues with fewer, or None."""
    return self._read_members(_FEWER)

  def refresh_fewer(self) -> None:
    """Writes, on the first process, that its supervisor is alive."""
    found = self.find_fewer()
    if found is not None:
      self._write_members(
        _FEWER, found.generation, found.hosts, found.count + 1
      )

  def ask(self) -> None:
    """Writes that this process came back."""
    self._write_own(_RETURN, {})

  def admit(self, generation: int) -> bool:
    """Writes the processes of the next start, if some came back.

    Args:
      generation: Of the run that continues with fewer.
    """
    returned = self._read_all(_RETURN)
    if not returned:
      return False
    hosts = {process: str(each["host"]) for process, each in returned.items()}
    hosts |= self.find_present(generation)
    self._write_members(_MORE, generation + 1, hosts)
    for process in returned:
      self._remove(f"{_RETURN}{process}.json")
    if len(hosts) < self.num_processes:
      self._write_members(_FEWER, generation + 1, hosts)
    else:
      self._remove(_FEWER)
    return True

  def find_admission(self, generation: int) -> Members | None:
    """Returns the processes of a later start with this one, or None."""
    found = self._read_members(_MORE)
    if found is None or found.generation <= generation:
      return None
    return found if self.process_id in found.hosts else None

  def clear(self) -> None:
    """Removes the files of earlier starts, which have ended."""
    for name in (_FEWER, _MORE, f"{_RETURN}{self.process_id}.json"):
      self._remove(name)

  def withdraw(self, *, is_first: bool) -> None:
    """Removes the files of this process, which ends.

    Args:
      is_first: Whether it is the first of a run that continues with fewer.
    """
    self._remove(f"{_RETURN}{self.process_id}.json")
    if is_first:
      self._remove(_FEWER)

  @property
  def _folder(self) -> epath.Path:
    return self.run_dir / process_failures.FOLDER

  def _write_own(self, kind: str, values: Mapping[str, Any]) -> None:
    self._write(
      f"{kind}{self.process_id}.json",
      {"host": socket.gethostname(), **values},
    )

  def _write_members(
    self, name: str, generation: int, hosts: Mapping[int, str], count: int = 0
  ) -> None:
    texts = {str(process): host for process, host in hosts.items()}
    self._write(
      name, {"generation": generation, "hosts": texts, "count": count}
    )

  def _write(self, name: str, values: Mapping[str, Any]) -> None:
    path = self._folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    files.write_text(path, json.dumps(values))

  def _remove(self, name: str) -> None:
    with contextlib.suppress(OSError, user_error.UserError):
      (self._folder / name).unlink(missing_ok=True)

  def _read_members(self, name: str) -> Members | None:
    # Another may be writing it.
    with contextlib.suppress(OSError, ValueError):
      return files.read_json(self._folder / name, _to_members, kind="processes")
    return None

  def _read_all(self, kind: str) -> dict[int, dict[str, Any]]:
    """Returns the files of one kind by process, without damaged ones."""
    found = {}
    for path in self._folder.glob(f"{kind}*.json"):
      # Others may be writing theirs.
      with contextlib.suppress(OSError, ValueError):
        found[int(path.stem.removeprefix(kind))] = files.read_json(
          path, _to_process, kind="a process"
        )
    return found


def _to_process(value: Any) -> dict[str, Any]:
  process = files.to_object(value)
  files.check_type("host", process["host"], str)
  return process


def _to_members(value: Any) -> Members:
  parsed = files.to_object(value)
  hosts = files.to_object(parsed["hosts"])
  return Members(
    generation=int(parsed["generation"]),
    hosts={int(process): str(host) for process, host in hosts.items()},
    count=int(parsed["count"]),
  )
