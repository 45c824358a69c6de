"""Several processes of one run: how they find each other, share batches, agree, and end together.

Every process runs the same program on the same configuration; what one of them alone knows (a signal, a reward, what
lies in a run's folder) is agreed on before anything follows from it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext_posttrain.errors import ConfigError, PostTrainError, TrainingError, first_line

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Variables that a launcher sets in each process: `host:port` of the first one, how many there are, and which it is."""

HEARTBEAT_SECONDS = 30
"""After so long without a sign of life a process counts as lost."""

_ENDED = "maxtext_posttrain/ended"
_ARRIVED = "maxtext_posttrain/arrived"
_MEETING_MILLISECONDS = 60 * 60 * 1000
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 10.0
_EXIT_LOST = 1


@dataclasses.dataclass(frozen=True)
class Launch:
  """What a launcher says of a process: where the first one listens, how many there are, and which this is."""

  coordinator: str
  count: int
  index: int

  @classmethod
  def of(cls, environment: Mapping[str, str]) -> Launch | None:
    """From the variables; None where COUNT is not among them.

    Raises:
      ConfigError: they are incomplete, or no numbers.
    """
    if not environment.get(COUNT):
      return None
    coordinator, count, index = (environment.get(name, "") for name in (COORDINATOR, COUNT, INDEX))
    problems = []
    if not coordinator.rpartition(":")[0] or not coordinator.rpartition(":")[2].isdecimal():
      problems.append(f"{COORDINATOR}={coordinator}: must be host:port of the first process, as 10.0.0.1:8476")
    if not count.isdecimal() or int(count) < 1:
      problems.append(f"{COUNT}={count}: must be the number of processes")
    elif not index.isdecimal() or int(index) >= int(count):
      problems.append(f"{INDEX}={index}: must be from 0 to {int(count) - 1}, another one in each process")
    if problems:
      raise ConfigError(problems)
    return cls(coordinator, int(count), int(index))


def join(config: Any) -> None:
  """Connects this process with the others, where variables say that there are any; before JAX looks at a device.

  Without them it is left to MaxText, which asks a TPU, or the cluster.

  Args:
    config: `skip_jax_distributed_system`, `hardware` and `jax_distributed_initialization_timeout` are read.

  Raises:
    ConfigError: the variables or the configuration contradict each other.
    TrainingError: the others are not there in time.
  """
  launch = Launch.of(os.environ)
  skip = config.skip_jax_distributed_system
  if launch is None:
    if config.hardware == "cpu" and not skip and "JOB_INDEX" not in os.environ:
      raise ConfigError(
        "skip_jax_distributed_system=false: says that there are several processes, and nothing says which this is;"
        f" set {COORDINATOR}, {COUNT} and {INDEX} in each, or skip_jax_distributed_system=true"
      )
    return
  if skip and launch.count > 1:
    raise ConfigError(
      f"{COUNT}={launch.count}: skip_jax_distributed_system=true would start as many separate runs in one folder;"
      " set it to false"
    )
  if skip or jax.distributed.is_initialized():
    return
  try:
    jax.distributed.initialize(
      coordinator_address=launch.coordinator,
      num_processes=launch.count,
      process_id=launch.index,
      initialization_timeout=config.jax_distributed_initialization_timeout,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
  except Exception as error:  # jaxlib has no type of its own for it.
    raise TrainingError(
      f"process {launch.index} of {launch.count} found no others by {launch.coordinator}: {first_line(error)}; start"
      " all of them, or raise jax_distributed_initialization_timeout"
    ) from error


def is_first() -> bool:
  """Whether this process is the one that writes what a run has one of, and shows how it goes."""
  return jax.process_index() == 0


@contextlib.contextmanager
def quiet_beside_first() -> Iterator[None]:
  """Shows on standard output what the first process prints, and nothing of the others."""
  if is_first():
    yield
    return
  with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
    yield


def several() -> bool:
  """Whether there are other processes."""
  return jax.process_count() > 1


def meet() -> None:
  """Waits until every process is here: the first collective after it would wait for the others 30 seconds, no more."""
  if several():
    client = _client()
    # Each meeting has a name of its own; nobody arrives at the next before all have arrived at this.
    arrived = client.key_value_increment(_ARRIVED, 1)
    client.wait_at_barrier(f"{_ARRIVED}/{(arrived - 1) // jax.process_count()}", _MEETING_MILLISECONDS)


def _client() -> Any:
  """JAX's store of keys and values, for which it has no public name."""
  return distributed.global_state.client


def from_first(value: Any) -> Any:
  """The first process's numbers (a pytree of them, of one shape everywhere); every process must ask."""
  return multihost_utils.broadcast_one_to_all(value) if several() else value


def held_rows(sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> list[int] | None:
  """The indices along an axis of a global array that this process's devices hold; None for all of them."""
  indices = sharding.addressable_devices_indices_map(shape).values()
  rows = {row for index in indices if index is not None for row in range(*index[axis].indices(shape[axis]))}
  return None if len(rows) == shape[axis] else sorted(rows)


def global_array(
  values: np.ndarray, sharding: NamedSharding, *, axis: int, rows: int, held: list[int] | None
) -> jax.Array:
  """A global array of which each process has the rows that its devices hold.

  Args:
    values: with the rows `held` along `axis`, and everything along the other axes.
    sharding: of the global array.
    axis: that of the rows.
    rows: of the global array.
    held: see `held_rows`.
  """
  shape = (*values.shape[:axis], rows, *values.shape[axis + 1 :])

  def part(index: tuple[slice, ...] | None) -> np.ndarray:
    assert index is not None  # JAX's annotation alone allows it.
    start, stop, _ = index[axis].indices(rows)
    # Of one device's rows all are held, one after the other.
    first = start if held is None else held.index(start)
    return values[(*index[:axis], slice(first, first + stop - start), *index[axis + 1 :])]

  return jax.make_array_from_callback(shape, sharding, part)


def placed(tree: Any, shardings: Any) -> Any:
  """A pytree's arrays by their shardings, which may span processes; an array of one process is the same in all."""
  return jax.tree.map(_placed, tree, shardings) if several() else jax.device_put(tree, shardings)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    # `device_put` refuses keys that lie on several processes.
    same = leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    return leaf if same else jax.jit(lambda array: array, out_shardings=sharding)(leaf)
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    words = _placed(jax.random.key_data(leaf), sharding)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
  values = np.asarray(leaf)
  return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


class _StopRequest(Protocol):
  """See `trainers.signals.StopRequest`."""

  signal_number: int | None

  def __call__(self) -> bool: ...


class AgreedStop:
  """A stop that every process makes before the same update, whichever of them a signal reached.

  Each call says what was noted before the call before: the answer is on its way while an update computes, and costs it
  no time. All processes call it equally often.
  """

  def __init__(self, stop: _StopRequest, mesh: Mesh):
    """Takes what this process was asked, and the devices over which it is agreed on."""
    self._stop = stop
    self._spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    self._devices = mesh.size
    self._highest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
    self._asked: jax.Array | None = None

  def __call__(self) -> bool:
    """Whether to stop before the next update; once it is True the request has every process's signal."""
    number = np.int32(self._stop.signal_number or 0)
    mine = jax.make_array_from_callback((self._devices,), self._spread, lambda _: number[None])
    before, self._asked = self._asked, self._highest(mine)
    agreed = 0 if before is None else int(before)
    if agreed:
      self._stop.signal_number = agreed
    return bool(agreed)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
  """Ends every process soon after one has failed, and says which.

  Before that a process would wait for the lost one in a collective, or as it leaves, for minutes. A process that fails
  leaves word for the others; one that is killed is missed by the connection or, at the latest, by JAX after its time
  without a sign of life, which ends the process itself.

  Raises:
    TrainingError: another process failed or is gone.
  """
  if not several():
    yield
    return
  with _Watch() as watch:
    try:
      yield
    except PostTrainError as error:
      watch.fail(str(error).splitlines()[0], error.exit_code)
      raise
    except jax.errors.JaxRuntimeError as error:
      message = watch.loss() or (
        f"process {jax.process_index()} of {jax.process_count()} failed or lost another one: {first_line(error)}"
      )
      watch.fail(message)
      raise TrainingError(
        f"{message}; its own output says why; start all of them again: they go on from the newest checkpoint"
      ) from error
    except BaseException as error:
      watch.fail(first_line(error))
      raise


class _Watch:
  """A thread that looks for word of the other processes, and ends this one where its main thread can't."""

  def __init__(self) -> None:
    self._client = _client()
    self._me = jax.process_index()
    self._failed = False
    self._left = threading.Event()
    self._thread = threading.Thread(target=self._look, name="hosts", daemon=True)

  def __enter__(self) -> _Watch:
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    # After a failure it goes on: a thread that waits for a lost process would keep this one.
    if not self._failed:
      self._left.set()

  def fail(self, message: str, code: int = _EXIT_LOST) -> None:
    """Leaves word for the others; when this process is to end, it does not wait for them."""
    self._failed = True
    # Before what JAX has registered, which waits for all processes.
    atexit.register(_leave_now, code)
    with contextlib.suppress(Exception):
      self._client.key_value_set(f"{_ENDED}/{self._me}", message, allow_overwrite=True)

  def loss(self) -> str | None:
    """What another process said as it failed; it is waited for a little while."""
    for _ in range(3):
      word = self._word()
      if word is not None:
        return word
      time.sleep(_LOOK_SECONDS / 2)
    return None

  def _word(self) -> str | None:
    try:
      words = self._client.key_value_dir_get(_ENDED)
    except Exception:  # The first process keeps them; JAX itself ends this one where it is gone.
      return None
    said = {int(key.rpartition("/")[2]): message for key, message in words}
    said.pop(self._me, None)
    return next((f"process {index} failed: {message}" for index, message in sorted(said.items())), None)

  def _look(self) -> None:
    since: float | None = None
    while not self._left.wait(_LOOK_SECONDS):
      word = None if self._failed else self._word()
      ending = self._failed and not threading.main_thread().is_alive()
      if word is None and not ending:
        continue
      since = since or time.monotonic()
      # The main thread is given time to fail, or to end, by itself.
      if time.monotonic() - since > _GRACE_SECONDS:
        if word is not None:
          print(f"error: {word}", file=sys.stderr, flush=True)
        _leave_now(_EXIT_LOST)


def _leave_now(code: int) -> None:
  """Ends the process without what the interpreter does as it ends: there JAX waits for processes that are gone."""
  with contextlib.suppress(Exception):
    sys.stdout.flush()
    sys.stderr.flush()
  os._exit(code)
