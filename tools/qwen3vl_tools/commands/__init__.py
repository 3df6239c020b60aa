"""One module a subcommand: `add_parser` declares its flags, `run` builds a config and calls."""
