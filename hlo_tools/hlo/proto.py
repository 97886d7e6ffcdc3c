"""HLO protos to text, by XLA itself in a process of its own.

XLA ends its process on a proto that contradicts itself (a schedule in which an
asynchronous computation is out of order is enough), so it does not run in ours.
"""

import os
import subprocess
import sys

from hlo_tools.errors import HloToolsError

_TIMEOUT_SECONDS = 600
_LONGEST_MESSAGE = 400


class HloProtoError(HloToolsError):
    """A proto that XLA can not read."""


def proto_text(proto: bytes, filename: str = "<proto>") -> str:
    """The HLO text of a serialized HloModuleProto, HloProto or HloSnapshot.

    Raises:
        HloProtoError: XLA rejects it, or ends its process over it.
    """
    program = "from hlo_tools.hlo import proto; proto.main()"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    paths = [path for path in sys.path if path]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=module_proto(proto),
        capture_output=True,
        timeout=_TIMEOUT_SECONDS,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise HloProtoError(f"{filename}: XLA can not read this proto: {_why(done)}")
    return done.stdout.decode()


def _why(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line]
    # A Python error says it in its last line, a failed check of XLA in its first.
    fatal = [line for line in lines if line.startswith("F") or "Check failed" in line]
    message = (fatal[:1] or lines[-1:] or [f"exit status {done.returncode}"])[0]
    return message[:_LONGEST_MESSAGE]


def module_proto(proto: bytes) -> bytes:
    """The HloModuleProto in an HloProto or HloSnapshot, or `proto` itself.

    The first field of each of the three has the number 1: a module's is its name, the
    others' is the message below. A name does not begin with that field's tag.
    """
    while (inner := _first_field(proto)) is not None and inner[:1] == b"\n":
        proto = inner
    return proto


def _first_field(proto: bytes) -> bytes | None:
    """Value of field 1 where that comes first and is a string or message."""
    if proto[:1] != b"\n":
        return None
    length, shift, position = 0, 0, 1
    while position < len(proto) and shift < 64:
        byte = proto[position]
        position += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return proto[position : position + length]
    return None


def main() -> None:
    """From the proto on stdin to text on stdout."""
    from hlo_tools import _jax

    sys.stdout.write(_jax.hlo_proto_text(sys.stdin.buffer.read()))
