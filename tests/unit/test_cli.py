"""The command line: exit codes, and what stands on standard output and error. What a file may hold: ``test_config.py``."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proxy import __version__, cli
from proxy.tenants import hash_key

ROOT = Path(__file__).parents[2]
GATEWAY = ROOT / "config/gateway.yaml"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """A clean environment in an empty working directory."""
    for name in os.environ:
        if name.startswith("SLUICEGATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-planted-0001")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: exit code, standard output, standard error."""

    def call(*arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sluicegate", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        else:
            code = 0
        return int(code), *capsys.readouterr()

    return call


def refused(outcome: tuple[int, str, str], *lines: str) -> None:
    """Exit code 2, nothing on standard output, and exactly these lines on standard error."""
    code, out, err = outcome
    assert err.splitlines() == [f"sluicegate: {lines[0]}", *lines[1:]]
    assert (code, out) == (2, "")


def test_version(run):
    """--version prints the command's name and version."""
    assert run("--version") == (0, f"sluicegate {__version__}\n", "")


@pytest.mark.parametrize("command", [[], ["serve"], ["demo"], ["simulate"], ["check-config"], ["hash-key"]])
def test_help(run, command):
    """Every command explains itself on standard output."""
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert "Usage: " in out
    assert " ".join(command) in out


def test_help_names_every_command(run):
    """Without arguments the command says which commands there are."""
    code, out, err = run()
    assert code == 2
    assert all(name in out + err for name in ("serve", "demo", "simulate", "check-config", "hash-key"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nope"], "No such option: --nope"),
        (["serve", "--nope"], "No such option: --nope"),
        (["nope"], "No such command 'nope'"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--workers", "0"], "--workers"),
        (["simulate", "--latency", "nan"], "--latency"),
        (["check-config"], "FILE"),
    ],
)
def test_unusable_argument(run, arguments, words):
    """An argument that can't be used is named, with exit code 2 and no traceback."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words.lower() in err.lower()
    assert "Traceback" not in err


# check-config ------------------------------------------------------------------------------------------------------------


def test_usable_file(run, tmp_path):
    """A usable file gives one line that counts what is in it; no file is made, though no tenant key is set."""
    counts = "1 upstreams with 1 keys, 8 models, 1 tenants with 2 limits"
    assert run("check-config", GATEWAY) == (0, f"{GATEWAY}: usable: {counts}\n", "")
    assert list(tmp_path.iterdir()) == []


def test_tenant_key_stands_for_one_key(run, tmp_path):
    """The key that is made up for the check is the same wherever the file names it."""
    path = tmp_path / "twice.yaml"
    path.write_text(GATEWAY.read_text() + '  other: {keys: ["${SLUICEGATE_TENANT_KEY}"]}\n')
    refused(
        run("check-config", path),
        f"{path}: tenants.other.keys[0]: the same key stands at tenants.default.keys[0]; expected each key once",
    )


def test_kept_tenant_key_is_used(run, tmp_path):
    """The check takes the key that an earlier start has kept."""
    (tmp_path / ".sluicegate").mkdir()
    (tmp_path / ".sluicegate/tenant.key").write_text("sg-kept\n")
    path = tmp_path / "twice.yaml"
    path.write_text(GATEWAY.read_text() + f'  other: {{keys: ["sha256:{hash_key("sg-kept")}"]}}\n')
    assert "the same key stands at" in run("check-config", path)[2]


def test_unreadable_tenant_key_is_one_sentence(run, monkeypatch, tmp_path):
    """A data directory that is none is said in a sentence, and only where the file asks for the key."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLUICEGATE_DATA_DIR", "file")
    refused(
        run("check-config", GATEWAY),
        "file/tenant.key can't be read: Not a directory; set SLUICEGATE_TENANT_KEY or SLUICEGATE_DATA_DIR.",
    )
    monkeypatch.setenv("SLUICEGATE_TENANT_KEY", "a-key-of-ours")
    assert run("check-config", GATEWAY)[0] == 0


def test_every_problem_is_a_line(run, monkeypatch):
    """Each problem is one line on standard error."""
    path = ROOT / "config/invalid/several-problems.yaml"
    expected = re.findall(r"# expect: (.+)", path.read_text())
    monkeypatch.setenv("OPENAI_KEY", "x")
    monkeypatch.setenv("TEAM_KEY", "y")
    refused(run("check-config", path), *[f"{path}: {line}" for line in expected])


@pytest.mark.parametrize("command", [["check-config"], ["serve", "--config"]])
def test_missing_file(run, command):
    """A configuration that is not there is named."""
    refused(run(*command, "none.yaml"), "none.yaml: there is no such file; expected a YAML or JSON configuration")


def test_check_shows_no_secret(run, monkeypatch):
    """Neither a usable nor a refused file makes the check print a secret."""
    monkeypatch.setenv("SLUICEGATE_TENANT_KEY", "planted-tenant-key")
    monkeypatch.setenv("SLUICEGATE_ADMIN_TOKEN", "planted-token")
    assert "planted" not in str(run("check-config", GATEWAY))
    monkeypatch.setenv("OPENAI_API_KEY", "sg-planted-0001")
    code, out, err = run("check-config", GATEWAY)
    assert code == 2
    assert "planted" not in out + err


@pytest.mark.parametrize("command", [["serve"], ["demo"], ["check-config", GATEWAY]])
def test_unusable_log_level(run, monkeypatch, command):
    """A log level that does not exist is one clear sentence for each command that reads it."""
    monkeypatch.setenv("SLUICEGATE_LOG_LEVEL", "loud")
    refused(run(*command), "SLUICEGATE_LOG_LEVEL: expected 'debug', 'info', 'warning' or 'error'")


# hash-key ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stdin", [b"sg-key", b"sg-key\n", b"  sg-key\r\nsecond line\n"])
def test_hash_key(run, stdin):
    """The hash of the first line goes to standard output, ready for the configuration."""
    assert run("hash-key", stdin=stdin) == (0, f"sha256:{hash_key('sg-key')}\n", "")


@pytest.mark.parametrize("stdin", [b"", b"\n", b"  \n"])
def test_hash_key_of_nothing(run, stdin):
    """No key is no hash."""
    refused(run("hash-key", stdin=stdin), "Expected a key on standard input, got nothing.")


@pytest.mark.parametrize("stdin", [b"two words", "schlüssel".encode(), b"\xff\xfe", b"a\x00b"])
def test_hash_key_of_what_no_client_can_send(run, stdin):
    """A key that can't stand in a header is refused, without showing it."""
    words = "the key holds characters that can't stand in a header; expected printable ASCII without spaces"
    refused(run("hash-key", stdin=stdin), words)


# starting ----------------------------------------------------------------------------------------------------------------


def test_simulator_on_a_taken_port(run):
    """A port in use is one sentence that says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"Port {port} on 127.0.0.1 can't be opened (Address already in use): choose another with --port."
        refused(run("simulate", "--port", port), words)


def test_serving_from_a_data_directory_that_is_none(run, monkeypatch, tmp_path):
    """A file in the data directory's place is one sentence."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLUICEGATE_DATA_DIR", "file")
    monkeypatch.setattr("proxy.cli.configure", lambda *_, **__: None)  # leaves the loggers of this process alone
    code, _, err = run("serve", "--config", GATEWAY)
    assert (code, err) == (2, "sluicegate: The data directory file can't be used: File exists; set SLUICEGATE_DATA_DIR.\n")


@pytest.mark.parametrize("command", [[sys.executable, "-m", "proxy"], [str(Path(sys.executable).with_name("sluicegate"))]])
def test_process(command):
    """As a process of its own, module and script alike, the command ends with its code and without a traceback."""
    ended = subprocess.run(
        [*command, "check-config", "none.yaml"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "sluicegate: none.yaml: there is no such file; expected a YAML or JSON configuration\n"
