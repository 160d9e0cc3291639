"""Several processes of one group for a test: forks, since to import torch again in each takes longer."""

import json
import os
import socket
import sys


def run_in_processes(program: str, arguments: list):
    """Run a program, Python text with a function `main(argument)`: of each [number of processes, argument] so
    many processes, one after the other."""
    from helpers import run  # the processes do not need it

    run([__file__, program, json.dumps(arguments)])


def fork(main, rank: int, world_size: int, port: int, argument) -> int:
    if child := os.fork():
        return child
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    try:
        main(argument)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    program = {}
    exec(sys.argv[1], program)
    for world_size, argument in json.loads(sys.argv[2]):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        children = [fork(program["main"], rank, world_size, port, argument) for rank in range(world_size)]
        assert all([os.waitpid(child, 0)[1] == 0 for child in children])
