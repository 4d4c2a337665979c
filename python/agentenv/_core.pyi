"""Typed face of the Rust extension `agentenv._core` (rust/py)."""
