"""Update rules of papers in float64 numpy, for tests of optimizers.

Each class is the rule of one array of one layer: `direction(p, g, t)` returns
the update at rate -1 and without decay, for the t-th gradient g, from 1.
"""
# The module's docstring describes `direction`.
# ruff: noqa: D102

import functools
import itertools
from typing import Any

import numpy as np

from paxon.learners.optimizers import adam_8bit, kron


class AdamW:
  """Loshchilov & Hutter 2019, algorithm 2."""

  def __init__(self, shape, max_rms=None):
    self.m, self.v, self.max_rms = np.zeros(shape), np.zeros(shape), max_rms

  def direction(self, p: Any, g: Any, t: int) -> Any:
    self.m = 0.9 * self.m + 0.1 * g
    self.v = 0.95 * self.v + 0.05 * g**2
    u = (self.m / (1 - 0.9**t)) / (np.sqrt(self.v / (1 - 0.95**t)) + 1e-6)
    if self.max_rms is not None:
      u = u / max(1, np.sqrt(np.mean(u**2)) / self.max_rms)
    return u


class AdamMini(AdamW):
  """Zhang et al. 2024, algorithm 1: a block for each output, or one."""

  def direction(self, p: Any, g: Any, t: int) -> Any:
    blocks = np.mean(g**2, axis=0 if g.ndim == 2 else None, keepdims=True)
    self.m = 0.9 * self.m + 0.1 * g
    self.v = 0.95 * self.v + 0.05 * blocks
    return (self.m / (1 - 0.9**t)) / (np.sqrt(self.v / (1 - 0.95**t)) + 1e-6)


class Lion:
  """Chen et al. 2023, algorithm 2."""

  def __init__(self, shape):
    self.m = np.zeros(shape)

  def direction(self, p: Any, g: Any, t: int) -> Any:
    u = np.sign(0.9 * self.m + (1 - 0.9) * g)
    self.m = 0.99 * self.m + (1 - 0.99) * g
    return u


class CautiousLion(Lion):
  """Liang et al. 2024, algorithm 1."""

  def direction(self, p: Any, g: Any, t: int) -> Any:
    u = super().direction(p, g, t)
    c = u * g > 0
    return u * c * (g.size / (c.sum() + 1))


class Sgd:
  """Sutskever et al. 2013, in the form of the docstring."""

  def __init__(self, shape, momentum=None, nesterov=False):
    self.m, self.momentum, self.nesterov = np.zeros(shape), momentum, nesterov

  def direction(self, p: Any, g: Any, t: int) -> Any:
    if self.momentum is None:
      return g
    self.m = self.momentum * self.m + g
    return self.momentum * self.m + g if self.nesterov else self.m


class Adafactor:
  """Shazeer & Stern 2018, algorithms 4 and 5, with a given step size."""

  def __init__(self, shape, b1=None, factored=True):
    self.b1, self.m, self.v = b1, np.zeros(shape), np.zeros(shape)
    self.factored = factored and len(shape) == 2
    if self.factored:
      self.rows, self.columns = np.zeros(shape[0]), np.zeros(shape[1])

  def direction(self, p: Any, g: Any, t: int) -> Any:
    b2 = 1 - t**-0.8
    square = g**2 + 1e-30
    if self.factored:
      self.rows = b2 * self.rows + (1 - b2) * square.mean(1)
      self.columns = b2 * self.columns + (1 - b2) * square.mean(0)
      v = np.outer(self.rows, self.columns) / self.rows.mean()
    else:
      v = self.v = b2 * self.v + (1 - b2) * square
    u = g / np.sqrt(v)
    u = u / max(1, np.sqrt(np.mean(u**2)))
    u = u * max(1e-3, np.sqrt(np.mean(p**2)))
    if self.b1 is not None:
      u = self.m = self.b1 * self.m + (1 - self.b1) * u
    return u


class Muon:
  """Jordan et al. 2024; update_rms as in Liu et al. 2025, equation 4."""

  def __init__(self, shape, nesterov=True, update_rms=None):
    self.adam, self.m = AdamW(shape), np.zeros(shape)
    self.nesterov, self.update_rms = nesterov, update_rms

  def direction(self, p: Any, g: Any, t: int) -> Any:
    if g.ndim < 2:
      return self.adam.direction(p, g, t)
    self.m = 0.9 * self.m + g
    x = 0.9 * self.m + g if self.nesterov else self.m
    x = x / np.sqrt(np.sum(x**2))
    for _ in range(5):
      a = x.T @ x
      x = 3.4445 * x + x @ (-4.7750 * a + 2.0315 * a @ a)
    rows, columns = g.shape
    if self.update_rms is not None:
      return self.update_rms * np.sqrt(max(rows, columns)) * x
    return np.sqrt(max(1, columns / rows)) * x


class Soap:
  """Vyas et al. 2024, algorithm 3, with the first step of the authors' code."""

  def __init__(self, shape):
    self.t, self.m, self.v = -1, np.zeros(shape), np.zeros(shape)
    # Only sides of at most 4.
    self.used = [len(shape) == 2 and n <= 4 for n in shape]
    self.q = [np.eye(n) for n in shape]
    self.factors = [np.zeros((n, n)) for n in shape]

  def direction(self, p: Any, g: Any, t: int) -> Any:
    self.t += 1
    u = np.zeros_like(g)
    if self.t:
      self.m = 0.9 * self.m + 0.1 * g
      self.v = 0.95 * self.v + 0.05 * self.rotate(g) ** 2
      u = self.rotate(self.m) / (1 - 0.9**self.t) * np.sqrt(1 - 0.95**self.t)
      u = self.rotate(u / (np.sqrt(self.v) + 1e-6), back=True)
    for i in (0, 1):
      if not any(self.used[i : i + 1]):
        continue
      outer = (g @ g.T, g.T @ g)[i]
      self.factors[i] = 0.9 * self.factors[i] + 0.1 * outer
      if self.t == 0:
        self.q[i] = np.linalg.eigh(self.factors[i])[1][:, ::-1]
      elif self.t % 3 == 0:
        values = np.diag(self.q[i].T @ self.factors[i] @ self.q[i])
        order = np.argsort(-values)
        self.v = np.take(self.v, order, axis=i)
        self.q[i] = np.linalg.qr(self.factors[i] @ self.q[i][:, order])[0]
    return u

  def rotate(self, x, back=False):
    if x.ndim != 2:
      return x
    left, right = (q.T if back else q for q in self.q)
    return left.T @ x @ right


class Shampoo:
  """Anil et al. 2020, with Pax's momenta and AdaGrad's norm."""

  def __init__(self, shape, size=4, start=3, every=1, mean=False):
    self.size, self.start, self.every, self.mean = size, start, every, mean
    self.sums, self.m, self.n = (np.zeros(shape) for _ in range(3))
    self.blocks = {}

  def direction(self, p: Any, g: Any, t: int) -> Any:
    self.sums = self.sums + g**2
    a = g / (np.sqrt(self.sums) + 1e-16)
    u = self.precondition(g, t) if g.ndim else a
    u = u * (np.linalg.norm(a) / (np.linalg.norm(u) + 1e-16))
    share = 0.1 if self.mean else 1.0
    self.m = 0.9 * self.m + share * u
    self.n = 0.9 * self.n + share * a
    if t - 1 >= self.start:
      return 0.9 * self.m + share * u
    return 0.9 * self.n + share * a

  def precondition(self, g, t):
    u = np.zeros_like(g)
    starts = [range(0, n, self.size) for n in g.shape]
    for corner in itertools.product(*starts):
      at = tuple(slice(i, i + self.size) for i in corner)
      x = g[at]
      if corner not in self.blocks:
        eyes = [np.eye(n) for n in x.shape]
        self.blocks[corner] = [[1e-3 * eye for eye in eyes], eyes]
      factors, roots = self.blocks[corner]
      outers = [x @ x.T, x.T @ x] if x.ndim == 2 else [np.outer(x, x)]
      for i, outer in enumerate(outers):
        factors[i] = 0.95 * factors[i] + 0.05 * outer
        if (t - 1) % self.every == 0:
          values, vectors = np.linalg.eigh(factors[i])
          values = values + 1e-3 * values.max()
          roots[i] = (vectors * values ** (-0.5 / x.ndim)) @ vectors.T
      u[at] = roots[0] @ x @ roots[1] if x.ndim == 2 else roots[0] @ x
    return u


class Adam8Bit(AdamW):
  """Dettmers et al. 2022, section 2: each moment is stored rounded."""

  def direction(self, p: Any, g: Any, t: int) -> Any:
    u = super().direction(p, g, t)
    if g.size >= 16:
      self.m, self.v = self.store(self.m, True), self.store(self.v, False)
    return u

  def store(self, x, signed):
    values = adam_8bit.make_table(signed).astype(np.float64)
    scale = np.abs(x).max()
    nearest = np.abs(x[..., None] / scale - values).argmin(-1)
    return values[nearest] * scale


class Sophia:
  """Liu et al. 2023 with optax's order: the estimate after the direction."""

  def __init__(self, shape):
    self.m, self.h = np.zeros(shape), np.zeros(shape)

  def direction(self, p: Any, g: Any, t: int) -> Any:
    self.m = 0.9 * self.m + 0.1 * g
    u = self.m / (1 - 0.9**t) / np.maximum(0.5 * self.h, 1e-6)
    if t % 3 == 1:
      self.h = 0.95 * self.h + 0.05 * g**2
    return np.clip(u, -1.5, 1.5)


@functools.cache
def _draw(
  optimizer: kron.Kron, count: int, shape: tuple[int, ...]
) -> tuple[bool, Any]:
  is_changed = bool(optimizer.changes_factors(np.int32(count)))
  return is_changed, np.asarray(kron.draw_probe(np.int32(count), shape))


class Kron:
  """Pooladzandi & Li 2024, section 4; random numbers are those of ours."""

  def __init__(self, shape, optimizer, max_dim):
    self.m, self.optimizer = np.zeros(shape), optimizer
    self.q = [
      np.eye(n) if len(shape) == 2 and n <= max_dim else np.ones(n)
      for n in (shape or (1,))
    ]

  def direction(self, p: Any, g: Any, t: int) -> Any:
    self.m = 0.9 * self.m + 0.1 * g
    x = self.m / (1 - 0.9**t)
    x = x if x.ndim == 2 else x.reshape(-1, 1)
    is_changed, v = _draw(self.optimizer, t - 1, x.shape)
    if is_changed:
      self.change(x, v)
    left, right = self.dense()
    u = left.T @ left @ x @ right.T @ right
    u = u.reshape(g.shape)
    return u / max(1, np.sqrt(np.mean(u**2)) / 1.1)

  def dense(self) -> Any:
    dense = [q if q.ndim == 2 else np.diag(q) for q in self.q]
    return (*dense, np.eye(1))[:2]

  def change(self, x: Any, v: Any) -> None:
    left, right = self.dense()
    a = left @ (x + 1e-9 * v) @ right.T
    b = np.linalg.inv(left).T @ v @ np.linalg.inv(right)
    for i, q in enumerate(self.q):
      first, second = (a @ a.T, b @ b.T) if i == 0 else (a.T @ a, b.T @ b)
      if q.ndim == 1:
        first, second = np.diag(first), np.diag(second)
        norm = np.max(first + second)
        self.q[i] = q - 0.1 * (first - second) / norm * q
      else:
        total = first + second
        y = total @ total[np.argmax(np.linalg.norm(total, axis=1))]
        norm = np.linalg.norm(total @ y) / np.linalg.norm(y)
        self.q[i] = q - 0.1 / norm * np.triu(first - second) @ q
    if len(self.q) == 2:
      largest = [np.max(np.abs(q)) for q in self.q]
      ratio = np.sqrt(largest[1] / largest[0])
      self.q = [self.q[0] * ratio, self.q[1] / ratio]
