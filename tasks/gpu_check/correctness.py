"""Checks of GPU-only paths, each compared with results of the CPU.

The reference is another implementation in float32 on this machine's CPU, from
the same operands. On a CPU, XLA stands in for cuDNN and Pallas interprets
kernels, so that a dry run executes the same lines.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import re
import tempfile
from typing import Any, Final

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers import remat
from paxon.layers.attention import cudnn_attention, kernels
from paxon.layers.attention import mask as attention_mask
from paxon.layers.moe import grouped_matmul, triton_kernel
from paxon.quantization import quantized_einsum, recipes
from paxon.runner.checkpoints import checkpointer
from paxon.sharding import variables
from paxon.tasks.gpu_check import isolation

# Largest error as a share of the largest value. bfloat16 has 8 bits; sums and
# softmax weights are rounded before some matmuls.
_ATTENTION_LIMIT: Final = 2e-2
_MATMUL_LIMIT: Final = 1e-2
_TARGET: Final = re.compile(r'custom_call_target="([^"]+)"')
_CPU: Final = "cpu"
_HOST: Final = "pinned_host"


def compare(
  found: Any, expected: Any, *, limit: float, facts: isolation.Facts
) -> dict[str, Any]:
  """Compares trees of arrays.

  Args:
    found: Arrays that the device computed.
    expected: Arrays that the CPU computed.
    limit: Largest accepted error, as a share of each array's largest value.
    facts: Returned, or part of the error.

  Raises:
    CheckError: An error is larger, or not finite.
  """
  errors = [
    _error(np.asarray(f, np.float64), np.asarray(e, np.float64))
    for f, e in zip(
      jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    )
  ]
  worst = max(errors, key=lambda x: np.inf if np.isnan(x) else x)
  result = {"error": worst, "limit": limit, **facts}
  if not worst <= limit:
    raise isolation.CheckError(
      f"the largest error is {worst:.3g}, above {limit:g}",
      {**result, "errors": errors},
    )
  return result


def _error(found: np.ndarray, expected: np.ndarray) -> float:
  if found.shape != expected.shape:
    return float("nan")
  largest = max(float(np.max(np.abs(expected))), 1e-30)
  return float(np.max(np.abs(found - expected))) / largest


def _run(
  function: Callable[..., Any], *operands: Any, device: jax.Device
) -> tuple[Any, list[str]]:
  """Runs a function on a device; returns its result and its custom calls."""
  placed = jax.device_put(operands, device)
  # The gradient of JAX's attention mixes dtypes.
  with jax.numpy_dtype_promotion("standard"):
    compiled = jax.jit(function).lower(*placed).compile()
  out = jax.device_get(compiled(*placed))
  targets = set(_TARGET.findall(compiled.as_text() or ""))
  return out, sorted(targets)


def _devices() -> tuple[jax.Device, jax.Device]:
  """Returns the device to check, and the CPU."""
  return jax.local_devices()[0], jax.local_devices(backend=_CPU)[0]


def _normal(*shape: int, seed: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
  values = np.random.default_rng(seed).standard_normal(shape)
  return np.asarray(values, dtype)


def check_attention(
  settings: isolation.Settings, *, packed: bool, window: int | None = None
) -> isolation.Facts:
  """Compares cuDNN attention and its gradients with `kernels.plain`.

  Args:
    settings: Of all checks.
    packed: Whether sequences have several documents.
    window: Sliding window.
  """
  length, head_dim = (32, 16) if settings.is_dry else (512, 64)
  batch, heads, kv_heads = 2, 4, 2
  segments = np.ones((batch, length), np.int32)
  if packed:
    segments[0, length // 3 :] = 2
  segments[1, -length // 4 :] = 0  # Padding.
  positions = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
  device, cpu = _devices()
  rules = attention_mask.MaskRules(window=window)

  def differentiate(kernel: Callable[..., jax.Array]) -> Callable[..., Any]:
    def compute(
      arrays: Sequence[jax.Array],
      weights: jax.Array,
      segments: jax.Array,
      positions: jax.Array,
    ) -> Any:
      mask = attention_mask.AttentionMask(
        q_positions=positions,
        kv_positions=positions,
        q_segment_ids=segments,
        kv_segment_ids=segments,
        rules=rules,
      )
      out, backward = jax.vjp(lambda *x: kernel(*x, mask), *arrays)
      return out, backward(weights.astype(out.dtype))

    return compute

  arrays = tuple(
    _normal(batch, length, count, head_dim, seed=seed)
    for seed, count in enumerate((heads, kv_heads, kv_heads))
  )
  weights = _normal(batch, length, heads, head_dim, seed=9)
  is_cpu = device.platform == _CPU
  fused = functools.partial(
    cudnn_attention.cudnn,
    packed=packed,
    implementation="xla" if is_cpu else "cudnn",
  )
  found, calls = _run(
    differentiate(fused), arrays, weights, segments, positions, device=device
  )
  wide = jax.tree.map(lambda x: np.asarray(x, np.float32), (arrays, weights))
  expected, _ = _run(
    differentiate(kernels.plain), *wide, segments, positions, device=cpu
  )
  facts = {"custom_calls": calls, "stand_in": is_cpu}
  if not is_cpu and not any("fmha" in call for call in calls):
    raise isolation.CheckError("the program has no cuDNN kernel", facts)
  return compare(found, expected, limit=_ATTENTION_LIMIT, facts=facts)


def check_quantized_matmul(
  settings: isolation.Settings, *, recipe: str
) -> isolation.Facts:
  """Compares a quantized matmul and its gradients with the CPU's.

  Args:
    settings: Of all checks.
    recipe: Name of the recipe.
  """
  sizes = (32, 256, 128) if settings.is_dry else (512, 1024, 768)
  tokens, inputs, outputs = sizes
  chosen = recipes.find_recipe(recipe)
  key = jax.random.key_data(jax.random.key(0))

  def compute(
    x: jax.Array, kernel: jax.Array, gradient: jax.Array, key: jax.Array
  ) -> Any:
    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
      return quantized_einsum.quantized_einsum(
        "BD,DF->BF",
        x,
        kernel,
        recipe=chosen,
        key=jax.random.wrap_key_data(key),
      )

    out, backward = jax.vjp(multiply, x, kernel)
    return out, backward(gradient)

  operands = (
    _normal(tokens, inputs, seed=1),
    _normal(inputs, outputs, seed=2),
    _normal(tokens, outputs, seed=3),
    np.asarray(key),
  )
  device, cpu = _devices()
  found, calls = _run(compute, *operands, device=device)
  expected, _ = _run(compute, *operands, device=cpu)
  facts = {"custom_calls": calls}
  return compare(found, expected, limit=_MATMUL_LIMIT, facts=facts)


def check_grouped_matmul(settings: isolation.Settings) -> isolation.Facts:
  """Compares Triton's grouped matmul and its gradients with the CPU's loop."""
  rows, width, columns = (48, 32, 16) if settings.is_dry else (2048, 512, 384)
  sizes = np.asarray([rows // 4, 0, rows // 2, rows // 8], np.int32)
  device, cpu = _devices()
  is_cpu = device.platform == _CPU
  triton = triton_kernel.Triton(interpret=is_cpu)
  if is_cpu:
    triton = triton_kernel.Triton(
      rows=16, columns=16, contracting=16, interpret=True
    )

  def differentiate(kernel: grouped_matmul.Kernel) -> Callable[..., Any]:
    def compute(
      x: jax.Array, w: jax.Array, gradient: jax.Array, sizes: jax.Array
    ) -> Any:
      def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return grouped_matmul.grouped_matmul(x, w, sizes, kernel=kernel)

      out, backward = jax.vjp(multiply, x, w)
      return out, backward(gradient)

    return compute

  operands = (
    _normal(rows, width, seed=1),
    _normal(len(sizes), width, columns, seed=2),
    _normal(rows, columns, seed=3),
    sizes,
  )
  found, calls = _run(differentiate(triton), *operands, device=device)
  tiles = grouped_matmul.Tiles()
  expected, _ = _run(differentiate(tiles), *operands, device=cpu)
  facts = {"custom_calls": calls, "stand_in": is_cpu}
  return compare(found, expected, limit=_MATMUL_LIMIT, facts=facts)


def check_offload(settings: isolation.Settings) -> isolation.Facts:
  """Compares gradients with values offloaded to the host, and copies there."""
  size, layers = (16, 2) if settings.is_dry else (1024, 4)
  device, cpu = _devices()

  def compute(x: jax.Array, kernels_: jax.Array, *, policy: Any) -> Any:
    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
      # GPUs would otherwise multiply in TF32.
      y = jnp.matmul(x, kernel, precision=jax.lax.Precision.HIGHEST)
      return remat.tag(jnp.sin(y), remat.ATTENTION_OUTPUT), None

    def loss(kernels_: jax.Array) -> jax.Array:
      return jnp.sum(jax.lax.scan(layer, x, kernels_)[0])

    return jax.grad(loss)(kernels_)

  operands = (
    _normal(size, size, seed=1, dtype=np.float32),
    _normal(layers, size, size, seed=2, dtype=np.float32) / size**0.5,
  )
  offload = remat.offload(remat.ATTENTION_OUTPUT)
  found, _ = _run(
    functools.partial(compute, policy=offload), *operands, device=device
  )
  expected, _ = _run(
    functools.partial(compute, policy=remat.save_nothing),
    *operands,
    device=cpu,
  )
  kinds = sorted(memory.kind for memory in device.addressable_memories())
  facts: dict[str, Any] = {"memories": kinds}
  if _HOST in kinds:
    place = functools.partial(jax.sharding.SingleDeviceSharding, device)
    on_host = jax.device_put(operands[0], place(memory_kind=_HOST))
    usual = place(memory_kind=device.default_memory().kind)
    back = jax.device_put(on_host, usual)
    facts["copied"] = bool(np.array_equal(np.asarray(back), operands[0]))
    if not facts["copied"]:
      raise isolation.CheckError("a copy to the host and back differs", facts)
  return compare(found, expected, limit=1e-4, facts=facts)


def check_collectives(settings: isolation.Settings) -> isolation.Facts:
  """Compares collectives over all devices with numpy."""
  del settings
  count = jax.device_count()
  mesh = jax.make_mesh((count,), ("all",))
  whole = _normal(count * count, 8, seed=1, dtype=np.float32)
  shift = [(i, (i + 1) % count) for i in range(count)]
  functions = {
    "all_reduce": lambda x: jax.lax.psum(x, "all"),
    "all_gather": lambda x: jax.lax.all_gather(x, "all", tiled=True),
    "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "all", tiled=True),
    "permute": lambda x: jax.lax.ppermute(x, "all", shift),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "all", 0, 0, tiled=True),
  }
  blocks = whole.reshape(count, count, 8)
  total = blocks.sum(0)
  expected = {
    "all_reduce": np.tile(total, (count, 1)),
    "all_gather": np.tile(whole, (count, 1)),
    "reduce_scatter": total,
    "permute": np.roll(blocks, 1, axis=0).reshape(whole.shape),
    "all_to_all": blocks.swapaxes(0, 1).reshape(whole.shape),
  }
  found, kept = {}, []
  for name, function in functions.items():
    step = jax.jit(
      jax.shard_map(
        function, mesh=mesh, in_specs=jax.P("all"), out_specs=jax.P("all")
      )
    )
    placed = jax.device_put(whole, jax.NamedSharding(mesh, jax.P("all")))
    compiled = step.lower(placed).compile()
    if name.replace("_", "-") in (compiled.as_text() or ""):
      kept.append(name)
    found[name] = np.asarray(compiled(placed))
  # The compiler removes collectives of one device.
  facts = {"devices": count, "in_program": kept}
  return compare(found, expected, limit=1e-5, facts=facts)


def check_checkpoint(settings: isolation.Settings) -> isolation.Facts:
  """Saves arrays of the device, restores them, and compares every bit."""
  size = 8 if settings.is_dry else 2048
  device, _ = _devices()
  sharding = jax.sharding.SingleDeviceSharding(device)
  dtypes = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int32", "bool")
  arrays = [
    jax.device_put(
      _normal(size, size, seed=i, dtype=np.float32).astype(jnp.dtype(dtype)),
      sharding,
    )
    for i, dtype in enumerate(dtypes)
  ]
  specs = [
    variables.VariableSpec(f"params/{dtype}", x.shape, x.dtype, (None, None))
    for dtype, x in zip(dtypes, arrays, strict=True)
  ]
  with (
    tempfile.TemporaryDirectory() as folder,
    checkpointer.Checkpointer(epath.Path(folder) / "checkpoints") as saved,
  ):
    saved.save(1, arrays, specs=specs, data={})
    saved.wait()
    back = saved.restore(1, specs=specs, shardings=[sharding] * len(arrays))
  equal: Mapping[str, bool] = {
    dtype: bool(np.asarray(x).tobytes() == np.asarray(y).tobytes())
    for dtype, x, y in zip(dtypes, arrays, back.tree, strict=True)
  }
  if not all(equal.values()):
    raise isolation.CheckError("restored arrays differ", {"equal": equal})
  return {"dtypes": list(dtypes), "device": str(back.tree[0].devices())}
