"""takes nothing from the left, gives Linux (processes, namespaces, mounts, cgroups, files) to all; knows no product noun."""
