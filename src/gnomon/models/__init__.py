"""Room `models`: functions returning a Graph from a typed config, one file for each family, and presets."""
