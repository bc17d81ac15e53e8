"""The result of a case: one contender's time over another's."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from paxon.tools.benchmarks import interleaving, intervals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """Two contenders and their times.

  Attributes:
    case: What was compared, such as "train_step, quickstart size".
    first: The contender that is judged.
    second: The contender that it is judged by.
    pairs: Seconds of one unit of work of each, by round.
    limit: The largest ratio that is agreed to; `None` if nothing is.
    facts: What else to tell, such as sizes and rates; JSON values.
  """

  case: str
  first: str
  second: str
  pairs: interleaving.Pairs
  limit: float | None = None
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def ratio(self) -> intervals.Interval:
    """First over second, the median of the rounds' ratios."""
    return intervals.of_median(self.pairs.ratios())

  @property
  def verdict(self) -> str:
    """Whether the ratio is within its limit, as far as the interval tells."""
    if self.limit is None:
      return ""
    if self.ratio.high <= self.limit:
      return "holds"
    if self.ratio.low > self.limit:
      return "fails"
    return "open"

  def to_json(self) -> dict[str, Any]:
    """Returns everything, the single times included."""
    ratio = self.ratio
    return {
      "case": self.case,
      "first": self.first,
      "second": self.second,
      "ratio": dataclasses.asdict(ratio),
      "limit": self.limit,
      "verdict": self.verdict,
      "seconds": {
        "first": dataclasses.asdict(intervals.of_median(self.pairs.first)),
        "second": dataclasses.asdict(intervals.of_median(self.pairs.second)),
      },
      "rounds": dataclasses.asdict(self.pairs),
      "facts": dict(self.facts),
    }
