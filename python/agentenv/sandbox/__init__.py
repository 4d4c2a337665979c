"""takes a root, an engine and a slot from the left and below, gives one life to `node`."""
