"""A simulated OpenAI upstream that a real OpenAI SDK accepts: it answers by a script, and logs what it was asked.

What the gateway does with those answers, and who starts the simulator, is left to others.
"""

from __future__ import annotations

from proxy.simulator.app import Simulator
from proxy.simulator.journal import Seen, key_id_of
from proxy.simulator.script import Script, ScriptError
from proxy.simulator.server import RunningSimulator, serve

__all__ = ["RunningSimulator", "Script", "ScriptError", "Seen", "Simulator", "key_id_of", "serve"]
