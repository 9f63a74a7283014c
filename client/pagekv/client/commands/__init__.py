"""The subcommands of `pagekv`: each module adds its parsers with `add` and runs them."""
