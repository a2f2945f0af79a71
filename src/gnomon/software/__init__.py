"""Software: what the program that will run a plan does.

`Stack` is the record of one program, with a source for every field; `stack(name)` reads one of those in `stacks/` or a
file. Leaves out how prices read a record (`prices`, `prediction`) and the files of programs (`formats`).
"""

from gnomon.software.catalogue import ALIASES as ALIASES
from gnomon.software.catalogue import stack as stack
from gnomon.software.catalogue import stacks as stacks
from gnomon.software.record import GROUPS as GROUPS
from gnomon.software.record import Fact as Fact
from gnomon.software.record import OwnNumber as OwnNumber
from gnomon.software.record import OwnRuns as OwnRuns
from gnomon.software.record import Stack as Stack
from gnomon.software.record import with_facts as with_facts
from gnomon.software.runs import able as able
from gnomon.software.runs import beyond_lines as beyond_lines
from gnomon.software.runs import proposes as proposes
from gnomon.software.runs import unsupported as unsupported
