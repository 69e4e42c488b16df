"""Names, modes and locks in the data directory. Who takes them when is left to the tests of the processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from proxy.clock import Clock
from proxy.data_dir import DataDir, Lock, new_tenant_key
from proxy.errors import StartupError


class CountingClock(Clock):
    """Tokens that tell how many were asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def token(self, size_bytes: int = 12) -> str:
        self.asked += 1
        return f"{self.asked:02x}" * size_bytes


@pytest.fixture
def data_dir(tmp_path) -> DataDir:
    return DataDir.open(tmp_path / "deep" / "data")


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# the directory -----------------------------------------------------------------------------------------------------------


def test_directory_is_made_for_its_owner_only(data_dir):
    """A missing directory is made, with those above it; nobody else may enter it."""
    assert mode(data_dir.path) == 0o700
    assert data_dir.path.is_absolute()


def test_directory_may_exist(data_dir):
    """Opening it again changes nothing."""
    (data_dir.path / "kept").touch()
    assert DataDir.open(data_dir.path) == data_dir
    assert (data_dir.path / "kept").exists()


def test_file_in_its_place_is_refused(tmp_path):
    """A file where the directory should be is a sentence that names the variable to set."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StartupError, match=r"The data directory .* can't be used: .+; set SLUICEGATE_DATA_DIR\.$"):
            DataDir.open(path)


def test_directory_without_permission_is_refused(data_dir, monkeypatch):
    """A directory that this user can't write to is a sentence too."""
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may do everything
    with pytest.raises(StartupError, match="can't be used: permission denied"):
        DataDir.open(data_dir.path)


# locks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "is_taken"), [(False, False, False), (False, True, False), (True, False, False), (True, True, True)]
)
def test_two_holders(data_dir, first, second, is_taken):
    """Only shared locks go together."""
    one, two = data_dir.workers_lock, data_dir.workers_lock
    assert one.take(is_shared=first)
    assert two.take(is_shared=second) is is_taken
    assert (two.fd is not None) is is_taken
    two.give_back()
    one.give_back()


def test_giving_back_lets_the_next_in(data_dir):
    """A lock that was given back, once or twice, is free; giving back what was never held is harmless."""
    one, two = data_dir.control_lock, data_dir.control_lock
    two.give_back()
    assert one.take()
    one.give_back()
    one.give_back()
    assert one.fd is None
    assert two.take()
    two.give_back()


def test_refused_lock_leaks_no_descriptor(data_dir):
    """Trying for a lock in vain leaves no file open."""
    one = data_dir.control_lock
    assert one.take()
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208  (not a folder of files)
    assert not data_dir.control_lock.take()
    assert len(os.listdir("/dev/fd")) == before  # noqa: PTH208
    one.give_back()


def test_locks_are_apart(data_dir):
    """The three locks are three files, for their owner only."""
    locks = [data_dir.control_lock, data_dir.store_lock, data_dir.workers_lock]
    assert all(lock.take() for lock in locks)
    assert len({lock.path for lock in locks}) == 3
    assert {mode(lock.path) for lock in locks} == {0o600}
    for lock in locks:
        lock.give_back()


def child_with(lock: Lock, *, inherits: bool) -> subprocess.Popen[bytes]:
    """A process that says it runs, and ends when its standard input closes."""
    assert lock.fd is not None
    code = "import sys; print(flush=True); sys.stdin.read()"
    fds = (lock.fd,) if inherits else ()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds)
    assert child.stdout is not None
    child.stdout.readline()
    return child


@pytest.mark.parametrize("inherits", [True, False])
def test_lock_lasts_as_long_as_an_inheriting_child(data_dir, inherits):
    """A child that was passed the descriptor holds the lock when we let go; any other child does not."""
    lock, next_one = data_dir.store_lock, data_dir.store_lock
    assert lock.take()
    with child_with(lock, inherits=inherits) as child:
        lock.give_back()
        assert next_one.take() is not inherits
        child.communicate()
    assert inherits is (next_one.fd is None)
    assert next_one.fd is not None or next_one.take()
    next_one.give_back()


# the tenant key ----------------------------------------------------------------------------------------------------------


def test_tenant_key_is_made_once(data_dir):
    """The first call makes a key for the owner's eyes only; later ones return it."""
    clock = CountingClock()
    assert data_dir.tenant_key() is None
    key = data_dir.make_tenant_key(clock)
    assert key == "sg-" + "01" * 24
    assert data_dir.make_tenant_key(clock) == data_dir.tenant_key() == key
    assert clock.asked == 1
    assert mode(data_dir.path / "tenant.key") == 0o600


def test_empty_key_file_is_replaced(data_dir):
    """A file that a crash left empty is no key."""
    (data_dir.path / "tenant.key").touch()
    assert data_dir.tenant_key() is None
    assert data_dir.make_tenant_key(CountingClock()).startswith("sg-")


def test_keys_differ():
    """Keys hold 192 random bits."""
    keys = {new_tenant_key(Clock()) for _ in range(50)}
    assert len(keys) == 50
    assert {len(key) for key in keys} == {3 + 48}


@pytest.mark.parametrize(("content", "reason"), [(b"\xff", "it is not ASCII"), (None, "Is a directory")])
def test_unreadable_key_is_refused(data_dir, content, reason):
    """A key file that can't be read is a sentence that says what to set."""
    path = data_dir.path / "tenant.key"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(StartupError) as caught:
        data_dir.make_tenant_key(CountingClock())
    assert str(caught.value) == f"{path} can't be read: {reason}; set SLUICEGATE_TENANT_KEY or SLUICEGATE_DATA_DIR."


# notes -------------------------------------------------------------------------------------------------------------------


def test_store_socket_is_noted(data_dir, tmp_path):
    """The socket's path is what was noted last, or None."""
    assert data_dir.store_socket() is None
    for name in ("one", "a much longer name", "two"):
        data_dir.name_store_socket(tmp_path / name)
        assert data_dir.store_socket() == tmp_path / name


def test_running_mark_tells_of_a_crash(data_dir):
    """A start finds the mark only where the last run did not end in order."""
    data_dir.mark_ended()
    assert not data_dir.mark_running()
    assert data_dir.mark_running()
    data_dir.mark_ended()
    assert not data_dir.mark_running()


def test_files_stand_apart(data_dir):
    """The store's and the workers' files have folders of their own."""
    assert data_dir.store_files.parent == data_dir.metrics_files.parent == data_dir.path
    assert data_dir.store_files != data_dir.metrics_files
