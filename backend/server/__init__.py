"""The HTTP server: an OpenAI-compatible front, live statistics and live settings of one engine."""
