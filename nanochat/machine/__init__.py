"""The machine a script runs on: device, processes, signals, memory, precision, profiler."""
