"""Runs inside a container as ``python3 -I -c <this text>``: takes the agent from standard input and becomes it.

From the host come three lengths (4 bytes each, big-endian) and then a plan (JSON), the agent compiled by the host's
Python, and its source, for a Python that cannot read the former. Back go one byte when all of it is there, and a
report: a length and JSON. Then the agent serves on the same two descriptors. Standard library only; imports as little
as it can, for that costs each start.
"""

import json
import marshal
import os
import resource
import struct
import sys
import types


def take(size: int) -> bytes:
    """Exactly ``size`` bytes of standard input."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def become_agent() -> None:
    """Take what the host sends, report, and serve. Never returns."""
    plan_bytes, code_bytes, source_bytes = struct.unpack(">III", take(12))
    plan = json.loads(take(plan_bytes))
    code, source = take(code_bytes), take(source_bytes)
    os.write(1, b"R")  # received: what comes next may take as long as the preloaded modules take
    report: dict[str, object] = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    try:
        if plan["python"] not in (None, report["python"]):
            raise RuntimeError(f"the environment is for Python {plan['python']} and the image has {report['python']}")
        for name, value in plan["rlimits"].items():
            number = getattr(resource, "RLIMIT_" + name)
            if resource.getrlimit(number) != (value, value):  # gVisor lets nobody set some, and sets them itself
                resource.setrlimit(number, (value, value))
        report["rlimits"] = {n: resource.getrlimit(getattr(resource, "RLIMIT_" + n)) for n in plan["rlimits"]}
        packages = f"/opt/env/lib/python{report['python']}/site-packages"
        if os.path.isdir(packages):
            sys.path.append(packages)
        for name in plan["preload"]:
            __import__(name)
        magic = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER.hex()
        agent = types.ModuleType("fumehood.guest.agent")
        exec(marshal.loads(code) if magic == plan["magic"] else compile(source, "agent.py", "exec"), agent.__dict__)
        os.umask(0o077)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    text = json.dumps(report).encode()
    text = struct.pack(">I", len(text)) + text
    while text:
        text = text[os.write(1, text) :]
    if "error" in report:
        os._exit(1)
    agent.serve(0, 1, "/work")


if __name__ == "__main__":
    become_agent()
