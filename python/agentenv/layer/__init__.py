"""takes tars from `image`, gives `sandbox` one flat read-only root made of shared layers."""
