"""What a person runs: `python -m scripts.NAME --help`."""

import configurator

configurator.handle_errors()  # torch, which comes next, takes seconds
