"""The OpenAI-compatible HTTP server.

Three kinds of process: this one (HTTP, niced, never parses a body), input processes (check, render, tokenise: hostile
work under a time limit) and the engine core's (engine/process_core.py supervises it). See docs/server.md.
"""
