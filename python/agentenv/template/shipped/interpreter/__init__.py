"""Takes code over HTTP (E2B.md §5) from users of `e2b_code_interpreter`, gives it to kernels.

A package of its own that imports nothing of `agentenv`: it is copied into the image of the template
`code-interpreter-v1` and runs there, on the guest's Python.
"""
