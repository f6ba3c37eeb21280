"""A single run by the shortest way: what host and guest agree on beside the agent's frames. Stands on both sides.

Emulated, every path of code that is entered for the first time is translated, at some 10 microseconds for each block,
and the general way of an exec, which serves every kind of program, is 10,000 blocks longer than one run needs. So a
program that is the only one of its sandbox, without displays, standard input and variables of its own, goes in a frame
whose header is the empty object, with a body of fixed form: HEAD, the program's name, an environment (where it differs
from ENVIRONMENT, which the interpreter has already), the code.
"""

from __future__ import annotations

import struct

#: Exec number, most bytes of output, whether to end it when there is more, lengths of name and environment.
HEAD = struct.Struct("!IQ?HI")

#: What every program of the tier has, below the policy's own.
ENVIRONMENT = {"PATH": "/opt/env/bin:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
