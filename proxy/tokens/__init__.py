"""Tokens: what a request will probably use, what it did use, and what is booked in the end."""
