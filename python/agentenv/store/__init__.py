"""takes bytes and records from all, gives them back after any crash."""
