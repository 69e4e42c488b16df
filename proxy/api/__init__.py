"""The HTTP side: OpenAI's paths on the data port, operators' paths on the control port, and how errors look on either."""
