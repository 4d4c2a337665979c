"""takes a `cluster.contract`, gives HTTP: E2B's control plane and our own.

Nothing is decided here.
"""
