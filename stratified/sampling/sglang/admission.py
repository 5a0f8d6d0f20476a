"""Decides which server runs a generation: gives places to waiting generations in their order."""

import asyncio
import collections
from collections.abc import Sequence

from stratified.sampling.sglang.members import Member

Key = tuple[int, int, int]


class Places:
  """`in_flight` places at each usable server; none while `closed`."""

  def __init__(self, members: Sequence[Member], in_flight: int):
    self._members, self._in_flight = members, in_flight
    self._waiting: collections.deque[tuple[Key, asyncio.Future]] = collections.deque()
    self._homes: dict[tuple[int, int], Member] = {}
    self.closed = False

  def ask(self, key: Key) -> "asyncio.Future[Member | None]":
    """A future of a server with room, oldest first; setting it to None withdraws it."""
    place = asyncio.get_running_loop().create_future()
    self._waiting.append((key, place))
    self.dispatch()
    return place

  def give_back(self, member: Member) -> None:
    member.in_flight -= 1
    self.dispatch()

  def dispatch(self) -> None:
    while self._waiting and not self.closed:
      key, place = self._waiting[0]
      if not place.done():
        member = self._choose(key)
        if member is None:
          return
        member.in_flight += 1
        place.set_result(member)
      self._waiting.popleft()

  def _choose(self, key: Key) -> Member | None:
    """The server with the question's prefix, unless it lags behind; else the least busy one."""
    free = [
      member for member in self._members if member.usable and member.in_flight < self._in_flight
    ]
    if not free:
      return None
    least = min(free, key=lambda member: member.in_flight)
    home = self._homes.get(key[:2])
    if home not in free or home.in_flight > 2 * least.in_flight + 4:
      home = self._homes[key[:2]] = least
    return home

  @property
  def waiting(self) -> bool:
    return any(not place.done() for _, place in self._waiting)

  def forget_homes(self) -> None:
    """Forgets which server holds which prefix: their caches are empty."""
    self._homes.clear()

  def fail(self, error: Exception) -> None:
    for _, place in self._waiting:
      if not place.done():
        place.set_exception(error)
    self._waiting.clear()
