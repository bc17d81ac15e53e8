"""Distributions of the locks, and the import names they provide.

A lock is a hash-pinned `requirements` file as `uv pip compile` writes it. The
repository rule gives every distribution a target, `@pypi//:ml_dtypes`.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import re

# Imports not named like their distribution; the longest match wins.
_DISTRIBUTION_OF = {
  "PIL": "pillow",
  "absl": "absl_py",
  "google.protobuf": "protobuf",
  "orbax.checkpoint": "orbax_checkpoint",
  "tensorflow": "tensorflow_cpu",
  "yaml": "pyyaml",
}
_PINNED = re.compile(r"^([\w.-]+)(?:\[[^]]*\])?==[^\s;]+\s*(?:;\s*([^\\]*))?")
# Below each pin, uv lists the distributions and files that require it.
_ASKED_BY = re.compile(r"^    #(?: via |   )([\w.-]+)(?:\[[^]]*\])?\s*$")


@dataclasses.dataclass(frozen=True)
class Distributions:
  """All locked distributions.

  Attributes:
    repositories: For every distribution, the repository that provides it.
    requirements: For every distribution, those that it requires itself.
    labels: The targets of all repositories. Those of `@pypi` are nowhere else;
      the others may hold the same distribution, such as JAX's CUDA plugin with
      its run time and without.
  """

  repositories: Mapping[str, str]
  requirements: Mapping[str, frozenset[str]]
  labels: frozenset[str]

  @property
  def top_levels(self) -> frozenset[str]:
    """Their top-level import names."""
    plain = set(self.repositories) - set(_DISTRIBUTION_OF.values())
    return frozenset(plain).union(
      name.partition(".")[0]
      for name, distribution in _DISTRIBUTION_OF.items()
      if distribution in self.repositories
    )

  def find_labels(self, dotted: str) -> tuple[str, ...]:
    """Returns the targets of the module `dotted`; any of them will do.

    The first is that of the first lock; without a lock there are none.
    """
    distribution = _distribution(dotted)
    first = f"@{self.repositories.get(distribution)}//:{distribution}"
    found = {x for x in self.labels if x.endswith(f"//:{distribution}")}
    return (first, *sorted(found - {first})) if first in found else ()

  def closure(self, names: Iterable[str]) -> frozenset[str]:
    """Returns all distributions that `names` require, with `names`."""
    reached: set[str] = set()
    waiting = list(names)
    while waiting:
      name = waiting.pop()
      if name not in reached:
        reached.add(name)
        waiting += self.requirements.get(name, ())
    return frozenset(reached)


def parse_locks(locks: Mapping[str, str]) -> Distributions:
  """Returns the distributions of the locks.

  Args:
    locks: The text of each repository's lock, by the repository's name. What
      several hold is imported from the first, which is the core.
  """
  repositories: dict[str, str] = {}
  requirements: dict[str, set[str]] = {}
  labels = set()
  core = next(iter(locks), "")
  for repository, text in locks.items():
    found = pins(text)
    for name in found:
      first = repositories.setdefault(name, repository)
      labels.add(f"@{core if first == core else repository}//:{name}")
    for name, askers in found.items():
      for asker in askers:
        # A lock may ask for more extras of what comes from another one.
        if repositories.get(asker) == repository:
          requirements.setdefault(asker, set()).add(name)
  return Distributions(
    repositories,
    {name: frozenset(of) for name, of in requirements.items()},
    frozenset(labels),
  )


def pins(lock: str) -> dict[str, set[str]]:
  """Returns the pins of a lock, each with the distributions that need it.

  The names are those of the targets. What is for Windows only is left out;
  other conditions, such as Python's version, are not looked at.
  """
  found: dict[str, set[str]] = {}
  asked_by: set[str] = set()
  for line in lock.splitlines():
    if pin := _PINNED.match(line):
      windows = "== 'win32'" in (pin[2] or "")
      name = target_name(pin[1])
      asked_by = set() if windows else found.setdefault(name, set())
    elif asker := _ASKED_BY.match(line):
      asked_by.add(target_name(asker[1]))
  return found


def target_name(distribution: str) -> str:
  """Returns the name of a distribution's target: `ml-dtypes` -> `ml_dtypes`."""
  return re.sub(r"[-_.]+", "_", distribution).lower()


def _distribution(dotted: str) -> str:
  """Returns the distribution that holds the module `dotted`."""
  parts = dotted.split(".")
  for length in range(len(parts), 0, -1):
    prefix = ".".join(parts[:length])
    if prefix in _DISTRIBUTION_OF:
      return _DISTRIBUTION_OF[prefix]
  return target_name(parts[0])
