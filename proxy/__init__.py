"""Sluicegate: an OpenAI-compatible, rate-limiting reverse proxy. Start reading at ``gateway.py``."""

__version__ = "0.1.0"
