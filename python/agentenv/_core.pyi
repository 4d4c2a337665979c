"""Typed face of the Rust extension `agentenv._core` (rust/py)."""

def tsc_khz(milliseconds: int) -> int:
    """Rate of the time stamp counter in kHz, measured over ``milliseconds``; 0 off x86_64."""
