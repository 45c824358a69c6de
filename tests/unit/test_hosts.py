"""What a launcher says of a process, which rows a process holds, and a stop that is agreed on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxtext_posttrain import hosts
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.hosts import AgreedStop, Launch, held_rows, join
from maxtext_posttrain.trainers.signals import StopRequest

VARIABLES = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


class Config:
  hardware = "cpu"
  skip_jax_distributed_system = False
  jax_distributed_initialization_timeout = 5

  def __init__(self, **keys: Any):
    self.__dict__ |= keys


def test_a_launch_is_read():
  assert Launch.of(VARIABLES) == Launch("10.0.0.1:8476", 2, 1)
  assert Launch.of({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476"}) is None


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "must be host:port"),
    ({"JAX_COORDINATOR_ADDRESS": ""}, "must be host:port"),
    ({"JAX_NUM_PROCESSES": "two"}, "must be the number of processes"),
    ({"JAX_PROCESS_ID": "2"}, "must be from 0 to 1"),
    ({"JAX_PROCESS_ID": ""}, "must be from 0 to 1"),
  ],
)
def test_a_wrong_launch_is_refused(changes: dict[str, str], says: str):
  with pytest.raises(ConfigError, match=says):
    Launch.of(VARIABLES | changes)


@pytest.mark.parametrize(
  ("variables", "keys", "says"),
  [
    (VARIABLES, {"skip_jax_distributed_system": True}, "as many separate runs in one folder"),
    ({}, {}, "nothing says which this is"),
  ],
)
def test_a_contradiction_is_refused(
  monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], keys: dict[str, Any], says: str
):
  for name in VARIABLES:
    monkeypatch.delenv(name, raising=False)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(ConfigError, match=says):
    join(Config(**keys))


@pytest.mark.parametrize("keys", [{"skip_jax_distributed_system": True}, {"hardware": "tpu"}])
def test_without_variables_it_is_left_to_maxtext(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]):
  for name in VARIABLES:
    monkeypatch.delenv(name, raising=False)
  join(Config(**keys))
  assert not jax.distributed.is_initialized()


class Sharding:
  """Which part of an array [2, 8, 3] each of a process's devices holds."""

  def __init__(self, *rows: slice):
    self._rows = rows

  def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[int, tuple[slice, ...]]:
    assert shape == (2, 8, 3)
    return {device: (slice(None), rows, slice(None)) for device, rows in enumerate(self._rows)}


@pytest.mark.parametrize(
  ("rows", "held"),
  [
    ([slice(0, 2), slice(4, 6)], [0, 1, 4, 5]),
    ([slice(6, 8), slice(6, 8)], [6, 7]),
    ([slice(None), slice(None)], None),
    ([slice(4, 8), slice(0, 4)], None),
  ],
)
def test_a_process_holds_the_rows_of_its_devices(rows: list[slice], held: list[int] | None):
  sharding: Any = Sharding(*rows)
  assert held_rows(sharding, (2, 8, 3), 1) == held


def test_a_global_array_of_the_rows_that_are_held(monkeypatch: pytest.MonkeyPatch):
  """A device's part is found among the rows of its process, wherever in the batch they lie."""
  whole = np.arange(2 * 8 * 3).reshape(2, 8, 3)
  held = [0, 1, 4, 5]
  parts = {}

  def make(shape: tuple[int, ...], sharding: Any, part: Any) -> None:
    assert shape == whole.shape
    for device, index in sharding.addressable_devices_indices_map(shape).items():
      parts[device] = (index, part(index))

  monkeypatch.setattr(jax, "make_array_from_callback", make)
  sharding: Any = Sharding(slice(0, 2), slice(4, 6))
  hosts.global_array(whole[:, held], sharding, axis=1, rows=8, held=held)
  assert len(parts) == 2
  for index, part in parts.values():
    np.testing.assert_array_equal(part, whole[index])


def test_a_stop_is_agreed_on_one_call_later():
  request = StopRequest()
  stop = AgreedStop(request, Mesh(np.array(jax.devices()), ("x",)))
  assert [stop(), stop()] == [False, False]
  request.signal_number = 15
  assert [stop(), stop()] == [False, True]
  assert request.exit_code == 143
