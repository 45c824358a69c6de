"""Every part of the soak."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from tests.support.soak.cases import Part
from tests.support.soak.conversations import Conversations
from tests.support.soak.faults import FAULTS
from tests.support.soak.kills import KILLS
from tests.support.soak.mutations import Mutations


@contextlib.contextmanager
def all_parts() -> Iterator[Mapping[str, Part]]:
  """The parts by their names; the processes that they keep end with the block."""
  mutations, conversations = Mutations(), Conversations()
  try:
    yield {part.name: part for part in (KILLS, FAULTS, mutations.part, conversations.part)}
  finally:
    mutations.close()
    conversations.close()
