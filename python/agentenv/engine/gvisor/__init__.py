"""takes a ``MachineSpec``, gives a gVisor sandbox (runsc): isolation where there is no KVM."""
