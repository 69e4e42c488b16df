"""Upstreams: the servers behind the gateway, their keys, and which key serves the next call."""
