"""What a person runs: `python -m scripts.NAME --help`."""

import signal

import configurator

configurator.handle_errors()
# Until the script's settings are read, Ctrl-C ends the process without Python: the import of torch, which
# comes next and takes seconds, imports numpy from C++ and loses a KeyboardInterrupt in it
if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
