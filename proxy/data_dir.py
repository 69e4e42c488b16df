"""The data directory: one gateway at a time, its locks, the generated tenant key, and where the embedded store keeps its files.

Decides names and modes of files; who takes which lock when is ``server.py``'s and ``embedded_store.py``'s affair.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from proxy.clock import Clock
from proxy.errors import StartupError

TENANT_KEY_VARIABLE = "SLUICEGATE_TENANT_KEY"


class Lock:
    """An advisory lock on a file. It lasts as long as any process holds the descriptor, inherited ones included."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd: int | None = None

    def take(self, *, is_shared: bool = False) -> bool:
        """Take the lock at once; False where somebody else holds it."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self.fd = fd
        return True

    def give_back(self) -> None:
        """Close our descriptor; harmless when it is not held."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


@dataclass(frozen=True, slots=True)
class DataDir:
    """Everything the gateway keeps on disk."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> DataDir:
        """Make the directory where it is missing, for its owner only. Raises StartupError."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(0, "permission denied")
        except OSError as error:
            raise StartupError(f"The data directory {path} can't be used: {error.strerror}; set SLUICEGATE_DATA_DIR.") from None
        return cls(path.resolve())

    @property
    def control_lock(self) -> Lock:
        """Held by the control process."""
        return Lock(self.path / "control.lock")

    @property
    def store_lock(self) -> Lock:
        """Held by the embedded store's server process: it outlives a control process that was killed."""
        return Lock(self.path / "store.lock")

    @property
    def workers_lock(self) -> Lock:
        """Shared by all data workers, so that the last one out can tell."""
        return Lock(self.path / "workers.lock")

    @property
    def store_files(self) -> Path:
        """Where the embedded store writes."""
        return self.path / "store"

    @property
    def metrics_files(self) -> Path:
        """Where the workers' counters live."""
        return self.path / "metrics"

    @property
    def _socket_name_file(self) -> Path:
        return self.path / "store.socket"

    def name_store_socket(self, socket_path: Path) -> None:
        """Note where the embedded store listens, for whoever finds it still running."""
        self._socket_name_file.write_text(str(socket_path), "utf-8")

    def store_socket(self) -> Path | None:
        """Where the embedded store listens, or listened last."""
        try:
            return Path(self._socket_name_file.read_text("utf-8"))
        except FileNotFoundError:
            return None

    @property
    def _running_file(self) -> Path:
        return self.path / "running"

    def mark_running(self) -> bool:
        """Note that a gateway runs here. True when the last one did not end in order."""
        was_running = self._running_file.exists()
        self._running_file.touch(mode=0o600)
        return was_running

    def mark_ended(self) -> None:
        """Note that the gateway ended in order."""
        self._running_file.unlink(missing_ok=True)

    def tenant_key(self) -> str | None:
        """The key that was generated at an earlier start. Raises StartupError where it can't be read."""
        path = self.path / "tenant.key"
        try:
            return path.read_text("ascii").strip() or None
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise StartupError(f"{path} can't be read: {reason}; set {TENANT_KEY_VARIABLE} or SLUICEGATE_DATA_DIR.") from None

    def make_tenant_key(self, clock: Clock) -> str:
        """The generated tenant key; made and kept (mode 0600) at the first call."""
        kept = self.tenant_key()
        if kept is not None:
            return kept
        key = new_tenant_key(clock)
        # Written aside and linked into place: of two gateways that start together the first one's key holds for both.
        aside = self.path / f"tenant.key.{key[-8:]}"
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + "\n")
        try:
            (self.path / "tenant.key").hardlink_to(aside)
        except FileExistsError:
            aside.unlink()
            return self.tenant_key() or key
        aside.unlink()
        return key


def new_tenant_key(clock: Clock) -> str:
    """A fresh tenant key with 192 bits of randomness."""
    return "sg-" + clock.token(24)
