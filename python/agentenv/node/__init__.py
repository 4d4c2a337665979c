"""takes sandboxes, templates and images from the left, gives `cluster` one machine."""
