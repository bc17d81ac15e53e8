"""The type of functions that measure a batch's per-example outputs."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax

from paxon.learners import weighted

Batch: TypeAlias = Mapping[str, jax.Array]
Outputs: TypeAlias = Mapping[str, jax.Array]
MetricFn: TypeAlias = Callable[[Batch, Outputs], dict[str, weighted.Weighted]]
