"""A weighted mixture of streams with exact quotas.

After any number k of examples, the count of member i differs from its share
w_i * k by less than one: each draw takes the due member with the earliest
deadline (Tijdeman, The chairman assignment problem, 1980). With n members and
c_i = w_i * k - (examples of i before draw k), members with
c_i >= 1 / (2n - 2) are due, and (1 - 1 / (2n - 2) - c_i) / w_i is the time left
until the deadline. There is no randomness, and all arithmetic is on integers.

When a member ends, the others share its weight; the mixture ends with its last
member, so every example of members with finite epochs is read.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import fractions
import functools
from typing import Any

from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream, read_ahead

# Shares are integers with this sum: sums of floats depend on the order.
_WHOLE = 1 << 40


@dataclasses.dataclass(kw_only=True, eq=False)
class Mixture(example_stream.Stream):
  """Examples of several streams, interleaved by weight.

  A position contains the members' positions. A run may resume from it with
  other weights.

  Attributes:
    members: The streams by name.
    weights: The weight of each stream, with any sum. `None` is all equal.
    weight_changes: New weights by the index of the first batch that they apply
      to. A weight may be 0 temporarily, but not in all batches.
  """

  members: Mapping[str, example_stream.Stream]
  weights: Mapping[str, float] | None = None
  weight_changes: Mapping[int, Mapping[str, float]] = dataclasses.field(
    default_factory=dict
  )

  def __post_init__(self) -> None:
    if not self.members:
      raise ValueError("Mixture.members must not be empty.")
    for step in self.weight_changes:
      if step <= 0:
        raise ValueError(
          "Mixture.weight_changes must be at batch 1 or later (weights applies"
          f" before), got {step}."
        )
    for step, weights in self._phases:
      self._check_weights(step, weights)
    for name in self.members:
      if not any(weights[name] for _, weights in self._phases):
        raise ValueError(
          f"Mixture.weights: the member {name!r} has the weight 0 in every"
          " batch, so it would never be read; leave it out."
        )

  def start(self) -> dict[str, Any]:
    """Returns the start positions of the members."""
    return {
      "members": {name: m.start() for name, m in self.members.items()},
      "due": dict.fromkeys(self.members, 0),
      "ended": [],
    }

  def next_example(
    self, position: dict[str, Any], *, step: int
  ) -> tuple[list[Any], dict[str, Any]] | None:
    """Returns [member name, reference], and the position after it."""
    while len(position["ended"]) < len(self.members):
      shares = self._shares(self._phase(step), tuple(position["ended"]))
      due = {
        name: left + shares.get(name, 0)
        for name, left in position["due"].items()
      }
      name = _next_member(due, shares)
      found = self.members[name].next_example(
        position["members"][name], step=step
      )
      if found is not None:
        reference, after = found
        due[name] -= _WHOLE
        return [name, reference], {
          "members": {**position["members"], name: after},
          "due": due,
          "ended": position["ended"],
        }
      position = {
        "members": position["members"],
        "due": dict.fromkeys(self.members, 0),
        "ended": [*position["ended"], name],
      }
    return None

  def read(self, reference: list[Any]) -> example_source.Example:
    """Returns an example of a member."""
    name, inner = reference
    return self.members[name].read(inner)

  def name(self, reference: list[Any]) -> str:
    """Returns the name of an example for messages."""
    name, inner = reference
    return f"{self.members[name].name(inner)} of {name!r}"

  def num_tokens(self, reference: list[Any]) -> int | None:
    """Returns the number of tokens from the member."""
    name, inner = reference
    return self.members[name].num_tokens(inner)

  def check(self, position: Any) -> None:
    """Checks the members' positions."""
    names = set(self.members)
    keys = ("members", "due")
    if not isinstance(position, dict) or not all(
      isinstance(position.get(key), dict) and set(position[key]) == names
      for key in keys
    ):
      raise ValueError(
        f"The state's position must have the members {sorted(names)} of this"
        f" mixture, got {position!r}."
      )
    if not set(position.get("ended", ("",))) <= names or not all(
      isinstance(left, int) for left in position["due"].values()
    ):
      raise ValueError(f"The state's position is damaged: {position!r}.")
    for name, member in self.members.items():
      member.check(position["members"][name])

  def signature(self) -> dict[str, Any]:
    """Returns the members' signatures."""
    return {name: m.signature() for name, m in self.members.items()}

  @property
  def is_endless(self) -> bool:
    """Whether any member is endless."""
    return any(member.is_endless for member in self.members.values())

  def epoch(self, position: dict[str, Any]) -> int:
    """Returns the fewest epochs of any member that has not ended."""
    epochs = [
      member.epoch(position["members"][name])
      for name, member in self.members.items()
      if name not in position["ended"]
    ]
    return min(epochs, default=0)

  def set_workers(
    self, workers: read_ahead.Workers | None, *, every: bool
  ) -> None:
    """Sets the workers of the members."""
    for member in self.members.values():
      member.set_workers(workers, every=every)

  def prepare(self, references: Sequence[list[Any]]) -> None:
    """Passes each member its references."""
    for name, member in self.members.items():
      inner = [reference for owner, reference in references if owner == name]
      if inner:
        member.prepare(inner)

  def leaves(self) -> list[example_stream.Stream]:
    """Returns the leaves of the members."""
    return [leaf for m in self.members.values() for leaf in m.leaves()]

  def required_vocab_size(self) -> int | None:
    """Returns the largest of the members', None if one is unknown."""
    sizes = [member.required_vocab_size() for member in self.members.values()]
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(sizes) else None

  def check_readable(self) -> None:
    """Checks the members; an error names the member."""
    for name, member in self.members.items():
      try:
        member.check_readable()
      except ValueError as error:
        raise ValueError(f"Mixture member {name!r}: {error}") from error

  @functools.cached_property
  def _phases(self) -> list[tuple[int, Mapping[str, float]]]:
    weights = self.weights
    first = dict.fromkeys(self.members, 1.0) if weights is None else weights
    return [(0, first), *sorted(self.weight_changes.items())]

  def _phase(self, step: int) -> int:
    """Returns the index of the weights that apply to a batch."""
    return max(i for i, (first, _) in enumerate(self._phases) if first <= step)

  def _check_weights(self, step: int, weights: Mapping[str, float]) -> None:
    where = f"Mixture.weights of batch {step}"
    if set(weights) != set(self.members):
      raise ValueError(
        f"{where} must be of the members {sorted(self.members)}, got"
        f" {sorted(weights)}."
      )
    for name, weight in weights.items():
      if not 0 <= weight < float("inf"):
        raise ValueError(
          f"{where} must be numbers from 0 on, got {weight} for {name!r}."
        )
    if not any(weights.values()):
      raise ValueError(f"{where} are all 0; one must be positive.")

  @functools.lru_cache(maxsize=64)  # noqa: B019 Lives as long as the input.
  def _shares(self, phase: int, ended: tuple[str, ...]) -> dict[str, int]:
    """Returns positive integer shares that sum to `_WHOLE`."""
    weights = {
      name: fractions.Fraction(weight)
      for name, weight in self._phases[phase][1].items()
      if name not in ended
    }
    # All remaining members may have weight 0 in this phase: share equally.
    if not any(weights.values()):
      weights = dict.fromkeys(weights, fractions.Fraction(1))
    total = sum(weights.values())
    shares = {n: int(_WHOLE * w / total) for n, w in weights.items() if w}
    largest = max(shares, key=lambda name: shares[name])
    shares[largest] += _WHOLE - sum(shares.values())
    return {name: max(share, 1) for name, share in shares.items()}


def _next_member(due: Mapping[str, int], shares: Mapping[str, int]) -> str:
  """Returns the member to draw the next example from.

  `due` is each member's outstanding share in units of 1 / `_WHOLE`, including
  this draw; `shares` is the share in this draw of each eligible member.
  """
  num = len(shares)
  if num == 1:
    return next(iter(shares))
  # Scaled by 2n - 2 to stay in integers.
  factor = 2 * num - 2
  ready = [name for name in shares if factor * due[name] >= _WHOLE]
  if not ready:  # Possible just after a change of weights.
    return max(shares, key=lambda name: due[name])
  last = (factor - 1) * _WHOLE

  def time_left(name: str) -> fractions.Fraction:
    return fractions.Fraction(last - factor * due[name], shares[name])

  return min(ready, key=time_left)
