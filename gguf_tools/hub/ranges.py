"""Byte ranges of a file on the Hub, read by HTTP without keeping the file.

A large file's address on the Hub redirects to a signed address of the large storage, which holds for an hour
or so. It is asked for once and again when it has run out, so a range costs one request. A line that breaks in
the middle of a range goes on where it broke; rate limits and busy servers are waited for, see `client.call`.

Lengths are checked and, by TLS, what is sent. The whole file's hash is, where all of it has passed in an
order in which it can be; see `digests`.
"""

from __future__ import annotations

import threading
from typing import Any

from gguf_tools.errors import HubError
from gguf_tools.hub.answers import Fetched, endpoint, fetching, guard, origin
from gguf_tools.hub.client import call
from gguf_tools.hub.digests import InOrder
from gguf_tools.hub.limits import MIN_PROGRESS_BYTES, answer_seconds, silence_seconds
from gguf_tools.hub.pace import BrokenOff

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
        from huggingface_hub import hf_hub_url

        guard()  # before an address is made of HF_ENDPOINT
        self._digest = digest
        self.repo, self.commit, self.name, self.size_bytes = repo, commit, name, size_bytes
        self.n_requests = self.n_bytes = 0
        self._url = hf_hub_url(repo, name, revision=commit)
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
        from huggingface_hub.utils import get_session, hf_raise_for_status

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
        from huggingface_hub import get_hf_file_metadata
        from huggingface_hub.utils import build_hf_headers

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
