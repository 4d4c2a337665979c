"""takes a ``MachineSpec``, gives a QEMU microVM: KVM where it works, TCG where it does not."""
