"""The shape of the source: floors, purity, size and names. What the code does is left to all other tests."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "proxy"
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(PACKAGE.rglob("*.lua"))
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")

PURE = {
    "proxy.limits.token_bucket",
    "proxy.limits.sliding_window",
    "proxy.limits.leases",
    "proxy.limits.admission",
    "proxy.limits.state",
    "proxy.limits.levels",
    "proxy.limits.classes",
    "proxy.limits.queues",
    "proxy.limits.accounts",
    "proxy.limits.claims",
    "proxy.limits.costs",
    "proxy.limits.decisions",
    "proxy.tokens.estimate",
    "proxy.tokens.usage",
    "proxy.upstreams.selection",
    "proxy.forwarding.headers",
    "proxy.forwarding.body",
    "proxy.forwarding.sse",
}
IMPURE = {  # neighbours of the pure ones: each new module in their folders must be put here or there
    "proxy.limits.limiter",  # holds a store
    "proxy.limits.memory",  # a store
    "proxy.limits.model",  # words only; reads no clock either, but is no decision
    "proxy.limits.pipeline",  # sockets
    "proxy.limits.nodes",  # sockets
    "proxy.limits.redis",  # a store
    "proxy.limits.reservations",  # wait for settles
    "proxy.limits.settling",  # holds a store
    "proxy.limits.store",  # the protocol of stores
    "proxy.limits.subscription",  # sockets
    "proxy.limits.waiting",  # waits
    "proxy.upstreams.model",  # words only
    "proxy.upstreams.pool",  # holds what is in use
    "proxy.forwarding.forwarder",  # calls
    "proxy.forwarding.transport",  # sockets
}
SHARED_SCRIPTS = {"state", "limits", "queues", "classes"}  # put before others
UNTOLD_TIME = {"time", "random", "secrets", "uuid"}
BAD_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|managers?|misc)(_|$)|_v\d+$")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    """The first part of each module that is imported, anywhere in the file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def read_wall_clock(path: Path) -> list[int]:
    """Lines that call now, utcnow or today of datetime or date."""
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [call.lineno for call in calls if call.func.attr in ("now", "utcnow", "today")]  # type: ignore[attr-defined]


# floors ------------------------------------------------------------------------------------------------------------------


def lint_imports(folder: Path) -> tuple[int, str]:
    """Run the contracts on the package in ``folder``: exit code and report."""
    ended = subprocess.run([LINT_IMPORTS, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def contracts() -> list[dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its contracts, to be spoilt."""
    shutil.copytree(PACKAGE, tmp_path / "proxy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text("utf-8") + f"\n{line}\n", "utf-8")


def test_contracts_are_kept():
    """Every import goes down the floors, the pure modules stay pure, and the simulator stands alone."""
    code, report = lint_imports(ROOT)
    assert code == 0, report
    assert f"{len(contracts())} kept, 0 broken" in report


def test_copy_keeps_the_contracts(copy):
    """The copy that the next tests spoil is as sound as the original."""
    code, report = lint_imports(copy)
    assert code == 0, report


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("limits/model.py", "import proxy.gateway", "Floors"),
        ("metrics.py", "def late():\n    from proxy.api import openai", "Floors"),
        ("errors.py", "from proxy.clock import Clock", "Floors"),
        ("limits/token_bucket.py", "import time", "Pure"),
        ("limits/admission.py", "from proxy.clock import Clock", "Pure"),
        ("forwarding/sse.py", "def late():\n    import asyncio", "Pure"),
        ("tokens/usage.py", "from redis.asyncio import Redis", "Pure"),
        ("simulator/script.py", "from proxy.limits.model import Rate", "The simulator"),
        ("server.py", "from proxy.simulator import Simulator", "Only the command line"),
    ],
)
def test_contract_bites(copy, module, line, contract):
    """One import in the wrong direction breaks the contract that forbids it."""
    append(copy / "proxy" / module, line)
    code, report = lint_imports(copy)
    assert code == 1
    assert re.search(rf"^{contract}.* BROKEN$", report, re.MULTILINE), report


@pytest.mark.parametrize("name", ["unplaced.py", "unplaced/__init__.py"])
def test_module_without_a_floor_is_refused(copy, name):
    """A new module or folder that no floor names breaks the build."""
    path = copy / "proxy" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('"""A module that nobody placed."""\n')
    code, report = lint_imports(copy)
    assert code != 0
    assert "unplaced" in report


def test_pure_modules_are_those_of_the_contract():
    """The contract names exactly the pure modules listed here."""
    (contract,) = [contract for contract in contracts() if str(contract["name"]).startswith("Pure")]
    assert set(contract["source_modules"]) == PURE  # type: ignore[call-overload]


def test_no_module_beside_the_pure_ones_is_unsorted():
    """Each module in a folder that has pure ones is listed as pure or as not."""
    folders = {module.rpartition(".")[0] for module in PURE}
    beside = {dotted(path) for path in MODULES if path.name != "__init__.py"}
    assert {module for module in beside if module.rpartition(".")[0] in folders} == PURE | IMPURE


# time and randomness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "clock.py"], ids=ids)
def test_only_the_clock_reads_time_and_randomness(path):
    """No other module, the simulator's included, imports or calls a source of time or randomness."""
    assert UNTOLD_TIME.isdisjoint(imported(path))
    assert read_wall_clock(path) == []


def test_reading_time_is_found(tmp_path):
    """The search above sees imports inside functions and calls through any name."""
    path = tmp_path / "reads.py"
    path.write_text("def late():\n    from time import monotonic\n    import datetime as d\n    return d.datetime.now(d.UTC)\n")
    assert "time" in imported(path)
    assert read_wall_clock(path) == [4]
    assert {"time", "secrets"} <= set(imported(PACKAGE / "clock.py"))


# size, words and names ---------------------------------------------------------------------------------------------------


def long_functions(path: Path, most: int) -> list[str]:
    """Functions of more than ``most`` lines, decorators not counted, with their length."""
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sized = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [f"{path.name}: {name} has {lines} lines" for name, lines in sized if lines > most]


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_module_is_small_and_says_what_it_is_for(path):
    """A module opens with a sentence and stays below 400 lines, its functions below 50."""
    docstring = ast.get_docstring(tree(path)) or ""
    assert re.match(r"[A-Z`].{10,}[.:]($|\s)", docstring, re.DOTALL), f"{ids(path)} opens with {docstring!r}"
    assert len(path.read_text("utf-8").splitlines()) <= 400
    assert long_functions(path, 50) == []


def test_long_function_is_found():
    """The measure of functions counts methods and those inside others too."""
    assert any("load_config" in line for line in long_functions(PACKAGE / "config.py", 10))
    assert any("compose_mapping_node" in line for line in long_functions(PACKAGE / "config.py", 5))
    assert any("own_key" in line for line in long_functions(PACKAGE / "cli.py", 3))


def test_folders_are_two_deep_at_most():
    """Below proxy/ a file lies in a folder, or in a folder of a folder."""
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert [file for file in files if len(file.parts) > 3] == []


def test_no_name_says_nothing():
    """No file or folder of the project's is a drawer for anything."""
    roots = (PACKAGE, ROOT / "tests", ROOT / "config")
    stems = {path.name.split(".")[0] for root in roots for path in root.rglob("*")}
    assert [stem for stem in stems if BAD_NAMES.search(stem)] == []
    assert all(BAD_NAMES.search(name) for name in ("utils", "sse_helper", "common", "key_manager", "pool_v2"))


def test_no_file_holds_a_place():
    """A module has content: only the command's entry and the packages' openings are a line or two."""
    empty = [dotted(path) for path in MODULES if len(tree(path).body) < 2 and path.name != "__init__.py"]
    assert empty == []


@pytest.mark.parametrize("path", SCRIPTS, ids=ids)
def test_script_states_its_keys_arguments_and_reply(path):
    """A Lua script opens with what it is given and what it answers; a shared part, with what it is."""
    header = path.read_text("utf-8").split("\n\n", maxsplit=2)[:2]
    lines = "\n".join(header).splitlines()
    comment = [line for line in lines if line.startswith("--")]
    assert lines[0].startswith("-- ")
    words = ["-- KEYS: ", "-- ARGV: ", "-- Reply: "]
    if path.stem in SHARED_SCRIPTS:
        assert len(comment) >= 2
    else:
        assert [word for word in words if not any(line.startswith(word) for line in comment)] == []


def test_scripts_are_those_that_are_loaded():
    """No Lua file lies about unused, and the shared part stands beside those it is put before."""
    names = {path.stem for path in SCRIPTS}
    source = "".join((PACKAGE / "limits" / name).read_text("utf-8") for name in ("pipeline.py", "redis.py"))
    assert names > SHARED_SCRIPTS
    assert [name for name in names if not re.search(rf"""["']{name}(\.lua)?["']""", source)] == []
