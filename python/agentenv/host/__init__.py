"""takes nothing from the left, gives Linux to all: processes, namespaces, mounts, cgroups, files.

It knows no product noun.
"""
