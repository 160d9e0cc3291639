"""A clock for tests, so that none depends on how fast the machine is."""


class Watch:
    """In place of a module's `time`. A test moves `now` on; each look moves it by `tick` seconds."""

    def __init__(self, now: float = 1000.0, tick: float = 0.0):
        self.now, self.tick = now, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    monotonic = perf_counter = __call__
