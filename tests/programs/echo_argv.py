"""Prints how it was started and ends as told: what a launcher has to pass on.

python echo_argv.py {exit CODE | raise | return} [anything ...]
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import neighbor


def main():
    how, *rest = sys.argv[1:]
    print(__name__, Path(sys.argv[0]).name, Path(__file__).name, rest)
    print(neighbor.WHO, Path(sys.path[0]).name, sys.modules["__main__"].__name__)
    print(jnp.arange(4).sum())
    if how == "exit":
        sys.exit(int(rest[0]))
    if how == "raise":
        raise KeyError("as told")


if __name__ == "__main__":
    main()
