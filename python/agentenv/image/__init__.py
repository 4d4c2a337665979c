"""takes registries, archives, folders, Debian suites, gives `layer` tars and a configuration."""
