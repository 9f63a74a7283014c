"""The commands: `add` of each module adds its own to the parser."""
