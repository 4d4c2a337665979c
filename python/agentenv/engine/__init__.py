"""takes paths, descriptors and sizes, gives running machines to `sandbox`; knows no image."""
