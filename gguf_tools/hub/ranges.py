"""Byte ranges of a file on the Hub, read by HTTP without keeping the file.

A large file's address on the Hub redirects to a signed address of the large storage, which holds for an hour
or so. It is asked for once and again when it has run out, so a range costs one request. A line that breaks in
the middle of a range goes on where it broke; rate limits and busy servers are waited for, see `client.call`.

Lengths are checked and, by TLS, what is sent. The whole file's hash is, where all of it has passed in an
order in which it can be: SHA-256 goes through a file from its first byte to its last. A piece that comes
early is kept until its turn, as long as all such pieces have room in a budget; then the file's hash is given
up. Readers of dense models go through a shard from front to back. Experts that are stacked are read one
matrix of all of them after the other, while a shard has one expert after the other, so shards of these are
often given up.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

from gguf_tools.errors import HubError
from gguf_tools.hub.answers import Fetched, endpoint, fetching, origin
from gguf_tools.hub.client import call
from gguf_tools.hub.limits import MIN_PROGRESS_BYTES, BrokenOff, answer_seconds, silence_seconds

BUDGET_BYTES = 256 << 20
"""Bytes of all files of a model that may wait for their turn."""


class Budget:
    """Bytes that several files may keep together; safe to use from several threads."""

    def __init__(self, n_bytes: int = BUDGET_BYTES) -> None:
        self._left = n_bytes
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> bool:
        """Return whether so many bytes were left, and are taken now."""
        with self._lock:
            fits = n_bytes <= self._left
            self._left -= n_bytes * fits
        return fits

    def give_back(self, n_bytes: int) -> None:
        with self._lock:
            self._left += n_bytes


class InOrder:
    """The SHA-256 of a file as its pieces come; safe to use from several threads.

    n_bytes      of the file
    expected     its hash, in hex
    mismatch     called with the hash that was found, when all has come and it is another one; raises
    is_checked   all has come, and it was the file
    n_seen       bytes that have come, some perhaps twice
    """

    def __init__(self, n_bytes: int, expected: str, budget: Budget, mismatch: Callable[[str], None]) -> None:
        self.n_bytes, self.expected = n_bytes, expected
        self.is_checked = False
        self.n_seen = 0
        self._budget, self._mismatch = budget, mismatch
        self._hash = hashlib.sha256()
        self._position = 0
        self._early: dict[int, bytes] = {}
        self._is_given_up = False
        self._lock = threading.Lock()

    def take(self, offset: int, view: memoryview) -> None:
        """Take the bytes that stand at `offset`; raises what `mismatch` raises."""
        with self._lock:
            self.n_seen += len(view)
            if self._is_given_up or self.is_checked or offset + len(view) <= self._position:
                return
            if offset > self._position:
                self._keep(offset, view)
                return
            self._update(offset, view)
            while (first := min(self._early, default=self.n_bytes)) <= self._position and self._early:
                piece = self._early.pop(first)
                self._budget.give_back(len(piece))
                self._update(first, memoryview(piece))
            if self._position < self.n_bytes:
                return
            found = self._hash.hexdigest()
            self.is_checked = found == self.expected
            self._give_up()
        if not self.is_checked:
            self._mismatch(found)

    def _update(self, offset: int, view: memoryview) -> None:
        rest = view[self._position - offset :]
        self._hash.update(rest)
        self._position += len(rest)

    def _keep(self, offset: int, view: memoryview) -> None:
        if len(self._early.get(offset, b"")) >= len(view):
            return
        if not self._budget.take(len(view)):
            self._give_up()
            return
        self._budget.give_back(len(self._early.get(offset, b"")))
        self._early[offset] = bytes(view)

    def _give_up(self) -> None:
        self._budget.give_back(sum(map(len, self._early.values())))
        self._early.clear()
        self._is_given_up = True


_RUN_OUT = (401, 403, 404, 410)
"""HTTP status codes by which a signed address says that its time is over."""


class RemoteFile:
    """A file of a model, at one commit; safe to use from several threads.

    repo, commit, name   where it is
    size_bytes           what the Hub says of its length
    digest               is shown all that has come, and may refuse it
    n_requests, n_bytes  how much has been asked for and received
    """

    def __init__(
        self, repo: str, commit: str, name: str, size_bytes: int, digest: InOrder | None = None
    ) -> None:
        from gguf_tools.hub.library import hf_hub_url

        self._digest = digest
        self.repo, self.commit, self.name, self.size_bytes = repo, commit, name, size_bytes
        self.n_requests = self.n_bytes = 0
        self._url = hf_hub_url(repo, name, revision=commit, endpoint=endpoint())
        self._address: str | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<RemoteFile {self.repo}/{self.name}: {self.size_bytes:,} bytes>"

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset`.

        raises  HubError when they can't be had
        """
        done = 0

        def rest() -> None:
            nonlocal done
            while done < len(view):
                n_bytes = self._read(offset + done, view[done:])
                done += n_bytes
                if done < len(view) and n_bytes < MIN_PROGRESS_BYTES:
                    raise BrokenOff(f"{n_bytes} of {len(view)} bytes came")

        call(f"{self.repo}: {self.name}", rest, progress=lambda: done)
        if self._digest is not None:
            self._digest.take(offset, view)

    def _read(self, offset: int, view: memoryview) -> int:
        """Return how many bytes of a range have come; fewer than asked for only if the line broke."""
        from gguf_tools.hub.library import get_session, hf_raise_for_status

        asked = {"Range": f"bytes={offset}-{offset + len(view) - 1}"}
        for is_new in (False, True):
            address, headers = self._place()
            headers = {**headers, **asked}
            with (
                fetching(Fetched(self.commit, len(view))),
                get_session().stream("GET", address, headers=headers, timeout=silence_seconds()) as response,
            ):
                if response.status_code in _RUN_OUT and address != self._url and not is_new:
                    self._forget(address)
                    continue
                hf_raise_for_status(response)
                self._check(response, offset, len(view))
                return self._receive(response, view)
        raise AssertionError("the second address is taken as it is")

    def _receive(self, response: Any, view: memoryview) -> int:
        n_bytes = 0
        try:
            for piece in response.iter_raw():
                if n_bytes + len(piece) > len(view):
                    raise HubError(
                        f"{self.repo}: {self.name}: the server sent more than the {len(view)} bytes that were"
                        " asked for; fetch the model without --stream"
                    )
                view[n_bytes : n_bytes + len(piece)] = piece
                n_bytes += len(piece)
        except HubError:
            raise
        except Exception:
            if n_bytes == 0:  # otherwise the next request goes on from here
                raise
        with self._lock:
            self.n_requests += 1
            self.n_bytes += n_bytes
        return n_bytes

    def _check(self, response: Any, offset: int, n_bytes: int) -> None:
        """Refuse an answer that is not the range that was asked for: another piece, or the whole file."""
        expected = f"bytes {offset}-{offset + n_bytes - 1}/{self.size_bytes}"
        found = response.headers.get("Content-Range", "no range")
        if response.status_code != 206 or found != expected:
            raise HubError(
                f"{self.repo}: {self.name}: asked for {expected}, the server sent {found}; fetch the model"
                " without --stream"
            )

    def _place(self) -> tuple[str, dict[str, str]]:
        """Return the address to read from, and headers that may be sent there."""
        from gguf_tools.hub.library import build_hf_headers, get_hf_file_metadata

        with self._lock:
            if self._address is None:
                with fetching(Fetched(self.commit, 0)):
                    self._address = get_hf_file_metadata(self._url, timeout=answer_seconds()).location
            address = self._address
        return address, build_hf_headers() if origin(address) == origin(endpoint()) else {}

    def _forget(self, address: str) -> None:
        """Ask for another address, unless another thread has done so already."""
        with self._lock:
            if self._address == address:
                self._address = None
