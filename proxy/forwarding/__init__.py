"""Forwarding: bytes to the upstream and back, unchanged but for what the gateway must change."""
